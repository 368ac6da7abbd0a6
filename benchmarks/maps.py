"""What looking costs: an overview of one head against the fused kernel's forward on it, and rows of a very long one."""

import statistics
import subprocess
import sys
from functools import partial
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.tables import Table
from benchmarks.timing import measure_peak_megabytes, measure_seconds, time_contenders
from regard import AttentionMap, Causal
from regard.map import compiled_passes

WIDTH, HEADS, LENGTHS, LONG = 64, 12, (512, 1024, 2048, 4096, 8192), 131_072
TITLE = "overview of one causal head of width 64, float32"


def run(peak: dict[torch.dtype, float]) -> Table:
    """Milliseconds of the compiled and the plain traversal, proven equal, and of the fused forward, all in turn."""
    columns = [
        "T",
        "fused ms",
        "overview ms",
        "ratio to fused",
        "plain torch ms",
        "each of 12 ms",
        "ratio to fused",
        "MiB",
        "a row ms",
    ]
    table = Table(TITLE, columns)
    for t in LENGTHS:
        q, k, v = (torch.randn(1, 1, t, WIDTH) for _ in range(3))
        ways = {"overview": partial(concatenate_overview, q, k), "plain": partial(concatenate_plain_overview, q, k)}
        fused = {"fused": partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)}
        found = time_contenders(ways, 2e-3, beside=fused).medians
        ratio = found["overview"] / found["fused"]
        heads = time_heads(t)
        both = in_a_fresh_process(t), row_milliseconds(q, k)
        table.add(t, found["fused"], found["overview"], ratio, found["plain"], *heads, *both)
    q, k = torch.randn(2, 1, 1, LONG, WIDTH)
    once = 1e3 * measure_seconds(partial(concatenate_overview, q, k))
    table.add(LONG, None, once, None, None, None, None, in_a_fresh_process(LONG), row_milliseconds(q, k))
    return table


def time_heads(t: int) -> tuple[float, float]:
    """Milliseconds of each head of twelve that are looked at together, and how many times the fused forward that is."""
    q, k, v = (torch.randn(1, HEADS, t, WIDTH) for _ in range(3))
    fused = {"fused": partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)}
    found = time_contenders({"overview": lambda: AttentionMap(q, k, Causal()).overview().entropy}, 0, beside=fused).medians
    return found["overview"] / HEADS, found["overview"] / found["fused"]


def concatenate_overview(q: Tensor, k: Tensor) -> Tensor:
    """All numbers of an overview one after the other; distances as a share of the length, so that all are near one."""
    overview = AttentionMap(q, k, Causal()).overview()
    parts = {**vars(overview), "distance": overview.distance / q.shape[2]}
    return torch.cat([part.flatten() for part in parts.values()])


def concatenate_plain_overview(q: Tensor, k: Tensor) -> Tensor:
    """The same without the compiled pass."""
    with mock.patch.object(compiled_passes, "can_run_compiled", return_value=False):
        return concatenate_overview(q, k)


def row_milliseconds(q: Tensor, k: Tensor) -> float:
    """The median of a row of a map that was never traversed."""
    found = AttentionMap(q, k, Causal())
    times = [measure_seconds(lambda i=i: found[0, 0, i]) for i in torch.linspace(0, q.shape[2] - 1, 20).long().tolist()]
    return 1e3 * statistics.median(times)


def in_a_fresh_process(t: int) -> float | None:
    """The peak megabytes of an overview, above q and k."""
    ran = subprocess.run([sys.executable, "-m", "benchmarks.maps", str(t)], capture_output=True, text=True, check=True)
    return float(ran.stdout) if ran.stdout.strip() else None


def print_peak(t: int) -> None:
    """What the fresh process prints."""
    concatenate_overview(*torch.randn(2, 1, 1, 300, WIDTH))  # the compiled code, and what torch sets up at its first call
    q, k = torch.randn(2, 1, 1, t, WIDTH)
    print(measure_peak_megabytes(lambda: AttentionMap(q, k, Causal()).overview()) or "")


if __name__ == "__main__":
    print_peak(int(sys.argv[1]))
