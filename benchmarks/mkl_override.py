"""torch beside regard, as it comes and where MKL's check for an Intel processor is overridden.

torch's float32 products are MKL's, which runs slower loops on AMD's processors. A function of that name, loaded before the
library, answers the check instead; nothing else changes. Each way is a process of its own, in which torch and regard run in
turn and are proven equal. A machine without a C compiler has no override, and one of Intel needs none.
"""

import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from shutil import which

import torch
import torch.nn.functional as F

from benchmarks.layers import contenders, run_module
from benchmarks.maps import concatenate_overview
from benchmarks.tables import Table
from benchmarks.timing import forward_and_backward, time_contenders
from regard import Causal, Everything, attention
from regard.compiled import processor

TITLE = "torch as it comes, and with MKL's check for an Intel processor overridden, 12 heads of 64, float32"
COLUMNS = ["what", "T", "torch ms", "regard ms", "ratio", "torch ms, overridden", "regard ms", "ratio"]
OVERRIDE = "int mkl_serv_intel_cpu_true(void) { return 1; }\n"
HEADS, WIDTH, LENGTHS, LAYER, LONG = 12, 64, (512, 2048), 1024, 4096
Row = tuple[str, int, float, float]  # what, T, and the milliseconds of torch and of regard


def run(peak: dict[torch.dtype, float]) -> Table:
    """A row for each computation, with and without the override."""
    table = Table(TITLE, COLUMNS)
    with tempfile.TemporaryDirectory() as folder:
        override = None if processor.is_intel() else build_override(Path(folder))
        plain = measure_in_process({})
        overridden = measure_in_process({"LD_PRELOAD": str(override)}) if override else [None] * len(plain)
    for row, other in zip(plain, overridden, strict=True):
        rest = (None, None, None) if other is None else (*other[2:], other[3] / other[2])
        table.add(*row, row[3] / row[2], *rest)
    return table


def build_override(folder: Path) -> Path | None:
    """Compile the function that answers MKL's check; None without a C compiler."""
    compiler, made = which("cc") or which("gcc"), folder / "override.so"
    if compiler is None or sys.platform != "linux":
        return None
    (folder / "override.c").write_text(OVERRIDE)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(made), str(folder / "override.c")], check=True)
    return made


def measure_in_process(environment: dict[str, str]) -> list[Row]:
    """Measure all in a process with these variables."""
    command = [sys.executable, "-m", "benchmarks.mkl_override"]
    ran = subprocess.run(command, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True, check=True)
    return [tuple(row) for row in json.loads(ran.stdout)]


def measure() -> list[Row]:
    """Time torch and regard in turn."""
    rows: list[Row] = []
    for name, mask, causal in (("attention", Everything(), False), ("causal attention", Causal(), True)):
        for t in LENGTHS:
            q, k, v = (torch.randn(1, HEADS, t, WIDTH) for _ in range(3))
            kernel = partial(F.scaled_dot_product_attention, q, k, v, is_causal=causal)
            ways = {"torch": kernel, "regard": partial(attention, q, k, v, mask)}
            found = time_contenders(ways, 3e-6).medians
            rows.append((name, t, found["torch"], found["regard"]))
            leaves = [x.requires_grad_() for x in (q, k, v)]
            learning = {way: forward_and_backward(call, leaves) for way, call in ways.items()}
            found = time_contenders(learning, 3e-4).medians
            rows.append((f"{name}, both", t, found["torch"], found["regard"]))
    x = torch.randn(1, LAYER, WIDTH * HEADS)
    modules = {name: module.eval() for name, module in contenders(LAYER).items() if name != "lectures"}
    found = time_contenders({name: partial(run_module, module, x) for name, module in modules.items()}, 1e-5).medians
    rows.append(("four linear layers and attention", LAYER, found["four linears"], found["regard"]))
    q, k, v = torch.randn(3, 1, 1, LONG, WIDTH)
    fused = {"torch": partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)}
    found = time_contenders({"regard": partial(concatenate_overview, q, k)}, 0, beside=fused).medians
    rows.append(("overview of a head beside attention", LONG, found["torch"], found["regard"]))
    return rows


if __name__ == "__main__":
    print(json.dumps(measure()))
