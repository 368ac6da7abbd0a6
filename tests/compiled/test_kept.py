import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("numba", reason="numba is not installed: pip install regard[fast]")

from regard.compiled import processor, threads
from regard.compiled.kept import Entries


def test_what_several_keep_at_once_is_never_taken_for_something_else(tmp_path):
    def keep(name: str) -> None:
        entries = Entries(str(tmp_path), "function", "a stamp")
        for n in range(40):
            entries.save((name, n), (name, n))

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(keep, "abc"))
    entries = Entries(str(tmp_path), "function", "a stamp")
    found = {key: entries.load(key) for key in ((name, n) for name in "abc" for n in range(40))}
    assert {key: one for key, one in found.items() if one not in (None, key)} == {}
    assert any(found.values())  # what is lost is compiled again


MULTIPLY = """
import json, torch
from regard.products import Quantised, compiled

torch.manual_seed(0)
x, weight = torch.randn(3, 768), torch.randn(521, 768)
small = Quantised.of(weight)
numbers = small.values * small.scales[:, None].double()
step = x.double().abs().amax(1, keepdim=True) / int(small.most)  # of the whole numbers that x is rounded to
off = (small(x).double() - x.double() @ numbers.T).abs() / (step * numbers.abs().sum(1))
kernels = (compiled.FLOATS, compiled.BYTES, compiled.SHORTS)
print(json.dumps([sum(one.cache_hits for one in kernels), float(off.max())]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not threads.usable(), reason="torch has no OpenMP of GNU's kind")
@pytest.mark.skipif("sse2" not in processor.read_host_features(), reason="this is no x86-64 processor")
def test_what_another_processor_compiled_is_not_used(tmp_path):
    """A home folder that machines share: each finds what it has compiled itself, and nothing else."""

    def count_hits(**setting: str) -> int:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_CPU")}
        environment |= {"NUMBA_CACHE_DIR": str(tmp_path), **setting}
        ran = subprocess.run([sys.executable, "-c", MULTIPLY], env=environment, capture_output=True, text=True, check=True)
        hits, off = json.loads(ran.stdout)
        assert off < 0.51  # half a step of each number, and the rounding of float32
        return hits

    old = {"NUMBA_CPU_NAME": "x86-64", "NUMBA_CPU_FEATURES": ""}
    assert [count_hits(), count_hits(**old), count_hits(), count_hits(**old)] == [0, 0, 3, 3]
