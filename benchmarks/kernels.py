"""`attention` against a bare F.scaled_dot_product_attention: what choosing and checking cost, what loops of our own gain."""

from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.tables import Table
from benchmarks.timing import forward_and_backward, time_contenders
from regard import Causal, Everything, attention
from regard.mechanism.fused import choose

HEADS, WIDTH = 12, 64
LENGTHS = (1, 128, 256, 512, 1024, 2048, 4096, 8192)
TITLE = "attention against a bare call of torch's kernel"
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2e-2}  # where it is not the very same kernel


def run(peak: dict[torch.dtype, float]) -> Table:
    """Milliseconds of both, their ratio, and the share of the machine's multiply-adds in that dtype."""
    table = Table(
        TITLE,
        [
            "dtype",
            "rule",
            "T",
            "kernel",
            "bare ms",
            "regard ms",
            "ratio",
            "overhead µs",
            "share of peak",
            "both: bare",
            "both: regard",
            "ratio of both",
        ],
    )
    for dtype in (torch.float32, torch.bfloat16):
        for name, mask, causal in (("none", Everything(), False), ("causal", Causal(), True)):
            for t in LENGTHS if dtype == torch.float32 else (1, 512, 4096):
                q, k, v = (torch.randn(1, HEADS, t, WIDTH).to(dtype) for _ in range(3))
                ways = {
                    "bare": partial(F.scaled_dot_product_attention, q, k, v, is_causal=causal),
                    "regard": partial(attention, q, k, v, mask),
                }
                found = time_contenders(ways, TOLERANCE[dtype] if t > 1 else 1e-2)
                bare, ours = found.medians["bare"], found.medians["regard"]
                work = 4 * HEADS * t * t * WIDTH * (0.5 if causal else 1)
                share = work / (ours / 1e3) / 1e9 / peak[dtype]
                leaves = [x.requires_grad_() for x in (q, k, v)]
                learning = {way: forward_and_backward(call, leaves) for way, call in ways.items()}
                both = time_contenders(learning, 100 * TOLERANCE[dtype]).medians
                figures = ours / bare, 1e3 * (ours - bare), share, both["bare"], both["regard"], both["regard"] / both["bare"]
                chosen = choose(*(x.detach() for x in (q, k, v)), mask).kernel
                table.add(str(dtype)[6:], name, t, chosen, bare, ours, *figures)
    return table
