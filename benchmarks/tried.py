"""The ways that were tried for a rule and for sinks on this machine, the one in use among them."""

import shutil
from functools import partial
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.tables import Table
from benchmarks.timing import seconds, timed
from regard import Causal, Window
from regard.mechanism import flex, kernels
from regard.mechanism.request import Request, ask

HEADS, WIDTH, T = 12, 64, 8192
TITLE = "what was tried, T = 8192, 12 heads of 64, float32"
RULES = {"window of 256": Causal() & Window(255), "causal": Causal()}
RUNS = (64, 128, 256, 512)


def run(peak: dict[torch.dtype, float]) -> Table:
    """Milliseconds forward of every way, all proven equal, and what the first call of a compiled one took."""
    table = Table(TITLE, ["rule", "sinks", "way", "ms", "first call s"])
    tensors = [torch.randn(1, HEADS, T, WIDTH) for _ in range(3)]
    for name, rule in RULES.items():
        for sinks in (None, torch.linspace(-1, 1, HEADS)):
            request = ask(*tensors, rule, sinks=sinks)
            ways = {f"runs of {n} queries": partial(in_runs, n, request) for n in (RUNS if sinks is None else RUNS[1:2])}
            ways["written out in runs of 128 queries"] = partial(kernels.written_in_blocks, request)
            if sinks is None:
                ways["dense mask"] = partial(F.scaled_dot_product_attention, *tensors, rule.table(T, T))
            if sinks is None and shutil.which("g++"):  # with sinks it needs a log-sum-exp, which it does not give on a CPU
                ways["compiled flex_attention"] = partial(flex.run, request)
            with torch.no_grad():
                first = {way: seconds(call) for way, call in ways.items() if "compiled" in way}
                medians = timed(ways, 3e-6).medians
            for way, milliseconds in medians.items():
                table.add(name, "" if sinks is None else "yes", way, milliseconds, first.get(way))
    return table


def in_runs(queries: int, request: Request) -> Tensor:
    """What attention does, with runs of another length."""
    with mock.patch.object(kernels, "BLOCK", queries):
        return kernels.blocks(request)
