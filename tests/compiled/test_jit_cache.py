import inspect
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock

pytest.importorskip("numba", reason="numba is not installed: pip install regard[fast]")

import numba
import torch
import torch.nn.functional as F

from bounds import EXPONENTIAL, assert_within, sum_bound
from regard.compiled import jit_cache, processor, threads
from regard.compiled.jit_cache import UniqueCacheFile, make_function_key
from regard.matmul import QuantizedLinear


def test_what_several_keep_at_once_is_never_taken_for_something_else(tmp_path):
    def keep(name: str) -> None:
        entries = UniqueCacheFile(str(tmp_path), "function", "a stamp")
        for n in range(40):
            entries.save((name, n), (name, n))

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(keep, "abc"))
    entries = UniqueCacheFile(str(tmp_path), "function", "a stamp")
    found = {key: entries.load(key) for key in ((name, n) for name in "abc" for n in range(40))}
    assert {key: one for key, one in found.items() if one not in (None, key)} == {}
    assert any(found.values())  # what is lost is compiled again


class Renamed:
    """A class that another version of regard has, and this one has not."""


@pytest.mark.parametrize("place", ["index", "data"])
def test_what_another_version_stored_is_compiled_again(tmp_path, monkeypatch, place):
    def open_cache():
        return UniqueCacheFile(str(tmp_path), "function", "a stamp")

    key, value = (Renamed, 1) if place == "index" else (1, Renamed)
    open_cache().save(key, value)
    assert open_cache().load(key) == value
    with monkeypatch.context() as patch:
        patch.delattr(f"{__name__}.Renamed")
        assert open_cache().load(key) is None
        open_cache().save("new", 2)
        assert open_cache().load("new") == 2


@pytest.mark.parametrize("name", ["*.nbi", "*.nbc"])
def test_a_file_that_was_cut_off_is_compiled_again(tmp_path, name):
    entries = UniqueCacheFile(str(tmp_path), "function", "a stamp")
    entries.save("key", "value" * 100)
    (file,) = tmp_path.glob(name)
    content = file.read_bytes()
    for size in range(len(content)):
        file.write_bytes(content[:size])
        assert entries.load("key") is None
    entries.save("key", 2)
    assert entries.load("key") == 2


EVERY = """
import importlib, json, pkgutil
import torch
from numba.core import event
from numba.core.dispatcher import Dispatcher
from numba.core.event import Listener

import regard
from regard import AttentionMap, Causal
from regard.compiled.jit_cache import LoopCache, LazyCallback
from regard.map.attribution_map import AttributionMap

class ByHand(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.project = torch.nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = self.project(x).chunk(3, -1)
        return torch.softmax(q @ k.mT, -1) @ v

class Count(Listener):
    def __init__(self):
        self.lowered = []

    def on_start(self, event):
        if "native_lowering" in event.data["name"]:
            self.lowered.append(event.data["name"])

    def on_end(self, event):
        pass

count = Count()
event.register("numba:run_pass", count)

loops = {"compiled", "numba_decoder", "numba_matmul", "numba_dequantize", "numba_gelu", "fused_loops"}
names = [one.name for one in pkgutil.walk_packages(regard.__path__, "regard.") if loops & set(one.name.split("."))]
values = [value for name in names for value in vars(importlib.import_module(name)).values()]
cached = [value for value in values if hasattr(value, "cache_clear")]
factories = [value for value in cached if value.__wrapped__.__code__.co_varnames[:1] == ("kind",)]
values += [factory(kind) for factory in factories for kind in ("float32", "uint16")]
callbacks = {id(value): value for value in values if isinstance(value, LazyCallback)}.values()
kept = {id(value): value for value in values if isinstance(value, Dispatcher) and isinstance(value._cache, LoopCache)}.values()
for callback in callbacks:
    callback.address

torch.manual_seed(0)
q, k, v = torch.randn(3, 1, 1, 297, 8)  # more than maps compute together
seen = AttentionMap(q, k, mask=Causal())
seen.overview(), seen.top(3), seen @ v, seen.mT @ v, seen.mT @ torch.cat([v] * 4, -1), seen.tile(slice(10, 60), slice(0, 50), 5)
AttributionMap(seen, q, v).overview()
model = ByHand()
with torch.no_grad(), regard.record(model):
    model(q[0])
never = [value.py_func.__qualname__ for value in kept if not value.signatures]
print(json.dumps({"callbacks": len(callbacks), "kept": len(kept), "never": never, "lowered": count.lowered}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not threads.can_run_loops(), reason="torch has no OpenMP of GNU's kind")
def test_a_second_process_compiles_none_of_the_functions_of_the_project():
    """The first process fills the cache that all tests share, where it lacks something: to compile all takes a minute."""

    def compile_all() -> dict:
        ran = subprocess.run([sys.executable, "-c", EVERY], capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr
        return json.loads(ran.stdout)

    compile_all()
    second = compile_all()
    assert second["callbacks"] >= 10
    assert second["kept"] >= 5
    assert (second["never"], second["lowered"]) == ([], [])  # each was used, and none was compiled


COMPILE = r"""
import os, sys
from regard.layers import numba_gelu
loop = numba_gelu.make_gelu_callback("float32")  # small: it compiles in seconds
for _ in range(3):
    if os.fork() == 0:  # in a process that has imported everything and compiled nothing
        os.write(1, b"ready\n")  # print may write the end of a line by itself, after what another process writes
        os.read(0, 1)
        loop.address
        os.write(1, b"%d\n" % loop.cache_hits)
        os._exit(0)
print([os.wait()[1] for _ in range(3)])
"""


@pytest.mark.slow
@pytest.mark.skipif(not threads.can_run_loops(), reason="torch has no OpenMP of GNU's kind")
def test_of_processes_that_need_a_function_at_once_one_compiles_it(tmp_path):
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", COMPILE], env=environment, **pipes) as process:
        assert [process.stdout.readline() for _ in range(3)] == ["ready\n"] * 3
        process.stdin.write("go!")  # a letter for each
        process.stdin.flush()
        lines = [process.stdout.readline() for _ in range(4)]
    assert sorted(lines) == ["0\n", "1\n", "1\n", "[0, 0, 0]\n"]


FORK = """
import os, sys
from regard.layers import numba_gelu
from regard.map.compiled import pair_products
pair_products.multiply_pairs.address
loops = [make("float32") for make in (numba_gelu.make_gelu_callback, numba_gelu.make_gelu_gradient_callback)]
loops[0].address
child = os.fork()
if child == 0:
    loops[1].address  # of the name of one that its parent compiled, and so of one lock with it
    os._exit(loops[1].cache_hits)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not threads.can_run_loops(), reason="torch has no OpenMP of GNU's kind")
def test_a_child_that_was_forked_compiles_what_it_needs(tmp_path):
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    ran = subprocess.run([sys.executable, "-c", FORK], env=environment, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_a_compilation_that_fails_leaves_the_function_to_other_processes():
    @jit_cache.njit_with_cache()
    def add(x, y):
        return x + y

    with pytest.raises(numba.TypingError):
        add(2, "3")
    place = Path(add._cache.cache_path) / f"{add._cache._impl.filename_base}.lock"
    with FileLock(place, timeout=60):  # raises if it stays held; a run on another emulated processor may hold it for a moment
        pass
    assert add(2, 3) == 5


def test_a_function_is_identified_by_what_it_closes_over_and_a_compiled_one_there_by_what_that_is():
    def make(dtype, number):
        @numba.njit
        def inner(x):
            return x + number

        def outer(x):
            return dtype(inner(x))

        return outer

    assert make_function_key(make(np.float32, 2)) == make_function_key(make(np.float32, 2))
    assert len({make_function_key(make(dtype, number)) for dtype in (np.float32, np.int8) for number in (2, 3)}) == 4


@pytest.mark.parametrize("problem", ["no folder to write", "a full disk"])
def test_what_cannot_be_kept_on_disk_is_compiled_in_memory(monkeypatch, problem):
    def refuse(*_):
        raise (
            RuntimeError("no locator available") if problem == "no folder to write" else OSError(28, "No space left on device")
        )

    if problem == "no folder to write":
        monkeypatch.setattr(jit_cache, "LoopCache", refuse)
    else:
        monkeypatch.setattr(UniqueCacheFile, "_open_for_write", refuse)

    @jit_cache.njit_with_cache()
    def add(x, y):
        return x + y

    assert add(2, 3) == 5


GELU = """
import json, os, sys, torch
from regard.layers import numba_gelu
from regard.layers.gelu import gelu_tanh

for _ in sys.stdin:
    if os.fork() == 0:  # in a process that has imported everything and compiled nothing
        found = gelu_tanh(torch.linspace(0, 9, 2**16 + 3))
        print(json.dumps([numba_gelu.make_gelu_callback("float32").cache_hits, found.tolist()]), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""
OLD = {"NUMBA_CPU_NAME": "x86-64", "NUMBA_CPU_FEATURES": ""}


@pytest.mark.slow
@pytest.mark.skipif(not threads.can_run_loops(), reason="torch has no OpenMP of GNU's kind")
@pytest.mark.skipif("sse2" not in processor.read_host_features(), reason="this is no x86-64 processor")
def test_what_another_processor_compiled_is_not_used(tmp_path):
    """A home folder that machines share: each finds what it has compiled itself, and nothing else."""
    expected = F.gelu(torch.linspace(0, 9, 2**16 + 3).double(), approximate="tanh")
    allowed = sum_bound(torch.float32, EXPONENTIAL + 10) * expected  # of x s: z moves s by (1 - s) γ(6) |z|, below 0.3 γ(6)

    def start_machine(**setting: str) -> subprocess.Popen:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_CPU")}
        environment |= {"NUMBA_CACHE_DIR": str(tmp_path), **setting}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        return subprocess.Popen([sys.executable, "-c", GELU], env=environment, **pipes)

    def count_hits(machine: subprocess.Popen) -> int:
        machine.stdin.write("run\n")
        machine.stdin.flush()
        hits, found = json.loads(machine.stdout.readline())
        assert_within(torch.tensor(found), expected, allowed)
        return hits

    with start_machine() as new, start_machine(**OLD) as old:
        assert [count_hits(new), count_hits(old)] == [0, 0]
        written = sorted(tmp_path.rglob("*"))
        assert [count_hits(new), count_hits(old)] == [1, 1]
        assert sorted(tmp_path.rglob("*")) == written  # a process that finds all it needs writes nothing
    assert [new.returncode, old.returncode] == [0, 0]


def measure_steps():
    """How far a product of quantized weights is off: in steps of the whole numbers that x is rounded to, of each number."""
    torch.manual_seed(0)
    x, weight = torch.randn(1, 768), torch.randn(521, 768)
    small = QuantizedLinear.from_weight(weight)
    numbers = small.dequantize_rows(slice(None), torch.float64)
    step = x.double().abs().amax(1, keepdim=True) / 32767
    return float(((small(x).double() - x.double() @ numbers.T).abs() / (step * numbers.abs().sum(1))).max())


MULTIPLY = f"""
import torch
from regard.matmul import QuantizedLinear

{inspect.getsource(measure_steps)}
print(measure_steps())
"""


@pytest.mark.slow
@pytest.mark.skipif(not threads.can_run_loops(), reason="torch has no OpenMP of GNU's kind")
@pytest.mark.skipif("sse2" not in processor.read_host_features(), reason="this is no x86-64 processor")
def test_a_product_of_quantized_weights_is_within_half_a_step_here_and_on_the_oldest_processor():
    """By the cache that all tests share: emulated processors need the code of the oldest too."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_CPU")} | OLD
    ran = subprocess.run([sys.executable, "-c", MULTIPLY], env=environment, capture_output=True, text=True, check=True)
    assert max(float(ran.stdout), measure_steps()) < 0.51  # half a step of each number, and the rounding of float32
