"""The ways that were tried on this machine for a rule, for sinks, and for looking at a head; the ones in use among them."""

import shutil
from functools import partial
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.tables import Table
from benchmarks.timing import measure_seconds, time_contenders
from regard import AttentionMap, Causal, Window
from regard.compiled import processor
from regard.compiled.threads import run_parts
from regard.map import pass_inputs
from regard.mechanism import flex, kernels
from regard.mechanism.request import Request, make_request

HEADS, WIDTH, T = 12, 64, 8192
TITLE = "what was tried, float32; of rules: T = 8192, 12 heads of 64"
RULES = {"window of 256": Causal() & Window(255), "causal": Causal()}
RUNS = (64, 128, 256, 512)


def run(peak: dict[torch.dtype, float]) -> Table:
    """Milliseconds forward of every way, all proven equal, and what the first call of a compiled one took."""
    table = Table(TITLE, ["rule", "sinks", "way", "ms", "first call s"])
    tensors = [torch.randn(1, HEADS, T, WIDTH) for _ in range(3)]
    for name, rule in RULES.items():
        for sinks in (None, torch.linspace(-1, 1, HEADS)):
            request = make_request(*tensors, rule, sinks=sinks)
            ways = {f"runs of {n} queries": partial(in_runs, n, request) for n in (RUNS if sinks is None else RUNS[1:2])}
            ways["written out in runs of 128 queries"] = partial(kernels.run_formula_in_blocks, request)
            if sinks is None:
                ways["dense mask"] = partial(F.scaled_dot_product_attention, *tensors, rule.table(T, T))
            if sinks is None and shutil.which("g++"):  # with sinks it needs a log-sum-exp, which it does not give on a CPU
                ways["compiled flex_attention"] = partial(flex.run_flex, request)
            with torch.no_grad():
                first = {way: measure_seconds(call) for way, call in ways.items() if "compiled" in way}
                medians = time_contenders(ways, 3e-6).medians
            for way, milliseconds in medians.items():
                table.add(name, "" if sinks is None else "yes", way, milliseconds, first.get(way))
    if processor.has_numba():
        products(table)
        overviews(table)
    return table


def products(table: Table) -> None:
    """q kᵀ of 256 queries of width 64 with 4096 keys, each way into room that is there, where it takes such."""
    q, k = torch.randn(256, WIDTH), torch.randn(4096, WIDTH)
    out, rough = torch.empty(256, 4096), torch.empty(256, 4096, dtype=torch.bfloat16)
    tiled = Tiled(q, k)
    ways = {"torch.mm": lambda: torch.mm(q, k.T, out=out), "tiles of registers, compiled by numba": tiled.product}
    if torch.backends.mkldnn.is_available():
        ways["oneDNN, torch.ops.mkldnn._linear_pointwise"] = lambda: torch.ops.mkldnn._linear_pointwise(
            q, k, None, "none", [], ""
        )
    of_q, of_k = ([x.bfloat16(), (x - x.bfloat16()).bfloat16()] for x in (q, k))
    left, right = torch.cat([of_q[0], of_q[0], of_q[1]], 1), torch.cat([of_k[0], of_k[1], of_k[0]], 1)
    # what comes out is rounded to bfloat16, and cannot be proven equal: for its time alone
    parts = {"torch.mm of bfloat16 parts, rounded": lambda: torch.mm(left, right.T, out=rough)}
    for way, milliseconds in time_contenders(ways, 1e-4, beside=parts).medians.items():
        table.add("q kᵀ, 256 x 4096", "", way, milliseconds, None)


class Tiled:
    """A product by the tiles that the compiled passes are made of, 16 rows at a time as there, by all threads."""

    def __init__(self, q: Tensor, k: Tensor) -> None:
        from numba import njit

        from regard.compiled.register_tiles import COLUMNS, ROWS, multiply_tile

        @njit(nogil=True)
        def product(q, panels, out, first, last):
            d, keys = q.shape[1], out.shape[1]
            for block in range(first, last, 16):
                for j in range(len(panels)):
                    for r in range(block, min(block + 16, last), ROWS):
                        multiply_tile(q, r * d, d, 1, panels, j * d * COLUMNS, d, out, r * keys + j * COLUMNS, keys)

        self.compiled, self.q, self.panels = product, q.numpy(), pass_inputs.pack_panels(k.T.numpy())
        self.out = np.empty((len(q), len(k)), np.float32)

    def product(self) -> Tensor:
        """The product, in the same room each time."""
        threads = torch.get_num_threads()
        step = len(self.q) // threads // 16 * 16
        ends = [n * step for n in range(threads)] + [len(self.q)]
        run_parts(lambda n: self.compiled(self.q, self.panels, self.out, *ends[n : n + 2]), threads)
        return torch.from_numpy(self.out)


def overviews(table: Table) -> None:
    """An overview of a causal head of width 64 at 4096 tokens, in blocks of so many rows."""
    q, k = torch.randn(2, 1, 1, 4096, WIDTH)
    ways = {f"blocks of {rows} rows": partial(compute_overview_in_blocks, rows, q, k) for rows in (8, 16, 32, 64)}
    for way, milliseconds in time_contenders(ways, 1e-4).medians.items():
        table.add("overview, T = 4096", "", way, milliseconds, None)


def compute_overview_in_blocks(rows: int, q: Tensor, k: Tensor) -> Tensor:
    """What overview does, in other blocks."""
    with mock.patch.object(pass_inputs, "FEW", rows):
        pass_inputs.make_relative_plan.cache_clear()
        return AttentionMap(q, k, Causal()).overview().entropy


def in_runs(queries: int, request: Request) -> Tensor:
    """What attention does, with runs of another length."""
    with mock.patch.object(kernels, "BLOCK", queries):
        return kernels.run_sdpa_in_blocks(request)
