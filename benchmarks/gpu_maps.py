"""On a GPU: the overview of twelve causal heads beside the fused kernel that hides them, and other questions to a map."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.tables import Table
from benchmarks.timing import time_contenders
from regard import AttentionMap, Causal
from regard.map import passes, pooling
from regard.map.plane import Plane

WIDTH, HEADS, LENGTHS, EXACT, LONGEST_TOP = 64, 12, (1024, 4096, 16384, 65536), 4096, 16384
TITLE = "maps on a GPU: 12 causal heads of width 64"
COLUMNS = [
    "dtype",
    "T",
    "fused ms",
    "overview ms",
    "ratio to fused",
    "plain torch, one head ms",
    "MiB",
    "a row ms",
    "top 4 ms",
    "A v ms",
]


def run(peak: dict[torch.dtype, float]) -> Table:
    """Milliseconds and the memory above q, k and v; up to 4,096 tokens held against the plain traversal."""
    table = Table(TITLE, COLUMNS)
    for dtype in (torch.float32, torch.bfloat16):
        for t in LENGTHS:
            torch.manual_seed(0)
            q, k, v = (torch.randn(1, HEADS, t, WIDTH, device="cuda", dtype=dtype) for _ in range(3))
            plain = time_plain(q, k) if t <= EXACT else None
            megabytes = measure_gpu_megabytes(lambda q=q, k=k: AttentionMap(q, k, Causal()).overview())
            ways = {
                "overview": lambda q=q, k=k: AttentionMap(q, k, Causal()).overview().entropy,
                "row": lambda q=q, k=k, t=t: AttentionMap(q, k, Causal())[0, 0, t - 1],
                "product": lambda q=q, k=k, v=v: AttentionMap(q, k, Causal()) @ v,
            }
            if t <= LONGEST_TOP:
                ways["top"] = lambda q=q, k=k: AttentionMap(q, k, Causal()).top(4)[0]
            fused = {"fused": partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)}
            found = time_contenders(fused, 0, beside=ways, within=2.0).medians
            ratio = found["overview"] / found["fused"]
            parts = found["row"], found.get("top"), found["product"]
            table.add(str(dtype)[6:], t, found["fused"], found["overview"], ratio, plain, megabytes, *parts)
    return table


def time_plain(q: Tensor, k: Tensor) -> float:
    """Milliseconds of the plain traversal of one head, proven equal to the compiled one."""
    edges = pooling.bin_edges(0, q.shape[2], 256)
    plane = Plane(AttentionMap(q, k, Causal()).planes.request, 0, 0)

    def traverse() -> Tensor:
        found, _ = passes.gather_with_picture(plane, edges, edges, passes.ROWS)
        return torch.cat([found.rows["entropy"], found.rows["largest"], found.received])

    def read() -> Tensor:
        found = AttentionMap(q[:, :1], k[:, :1], Causal()).overview()
        return torch.cat([x.flatten() for x in (found.entropy, found.largest, found.received)])

    return time_contenders({"plain": traverse, "overview": read}, 1e-4, within=1.0).medians["plain"]


def measure_gpu_megabytes(run: Callable[[], object]) -> float:
    """The most memory of the GPU that a call took above what was held before, in MiB."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return (torch.cuda.max_memory_allocated() - before) / 2**20
