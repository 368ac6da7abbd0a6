"""Rules handed over as rules against the same rules as a dense mask of T x T."""

import torch
import torch.nn.functional as F

from benchmarks.tables import Table
from benchmarks.timing import forward_and_backward, peak_megabytes, timed
from regard import Causal, Documents, Padding, Prefix, Window, attention
from regard.mechanism.fused import choose

HEADS, WIDTH, T = 12, 64, 8192
TITLE = "rules against a dense mask, T = 8192, 12 heads of 64, float32"
RULES = {
    "window of 256": Causal() & Window(255),
    "documents of 512": Causal() & Documents(torch.arange(T) // 512),
    "first 4 and a window of 256": Causal() & (Window(255) | Prefix(4)),
    "causal with padding": Causal() & Padding([T - 200]),
}


def run(peak: dict[torch.dtype, float]) -> Table:
    """Milliseconds and peak memory forward, milliseconds forward and backward; the mask is made outside the timing."""
    columns = ["rule", "kernel", "dense ms", "regard ms", "times faster", "dense MB", "regard MB", "share of peak"]
    table = Table(TITLE, [*columns, "dense both ms", "regard both ms", "times faster both"])
    leaves = [torch.randn(1, HEADS, T, WIDTH, requires_grad=True) for _ in range(3)]
    q, k, v = (leaf.detach() for leaf in leaves)
    for name, rule in RULES.items():
        dense = rule.table(T, T)
        contenders = {
            "dense": lambda d=dense: F.scaled_dot_product_attention(q, k, v, d),
            "regard": lambda r=rule: attention(q, k, v, r),
        }
        forward = timed(contenders, 2e-6)
        with_mask = {
            "dense": lambda r=rule: F.scaled_dot_product_attention(q, k, v, r.table(T, T)),
            "regard": contenders["regard"],
        }
        memory = [peak_megabytes(contender) for contender in with_mask.values()]
        both = timed(
            {
                "dense": forward_and_backward(lambda d=dense: F.scaled_dot_product_attention(*leaves, d), leaves),
                "regard": forward_and_backward(lambda r=rule: attention(*leaves, r), leaves),
            },
            2e-4,
        )
        share = 4 * HEADS * WIDTH * int(dense.sum()) / (forward.medians["regard"] / 1e3) / 1e9 / peak[torch.float32]
        times = [*forward.medians.values()], [*both.medians.values()]
        table.add(
            name,
            choose(q, k, v, rule).kernel,
            *times[0],
            times[0][0] / times[0][1],
            *memory,
            share,
            *times[1],
            times[1][0] / times[1][1],
        )
    return table
