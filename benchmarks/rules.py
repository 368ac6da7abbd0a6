"""Rules handed over as rules against the same rules as a dense mask of T x T."""

import subprocess
import sys
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.tables import Table
from benchmarks.timing import forward_and_backward, measure_peak_megabytes, time_contenders
from regard import Causal, Documents, Padding, Prefix, Window, attention
from regard.mechanism import choose

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
    columns = ["rule", "kernel", "dense ms", "regard ms", "times faster", "dense MiB", "regard MiB", "share of peak"]
    table = Table(TITLE, [*columns, "dense both ms", "regard both ms", "times faster both"])
    leaves = [torch.randn(1, HEADS, T, WIDTH, requires_grad=True) for _ in range(3)]
    q, k, v = (leaf.detach() for leaf in leaves)
    for name, rule in RULES.items():
        dense = rule.table(T, T)

        def attend_with_dense_mask(q, k, v, dense=dense):
            return F.scaled_dot_product_attention(q, k, v, dense)

        def attend_with_rule(q, k, v, rule=rule):
            return attention(q, k, v, rule)

        forward = time_contenders(
            {"dense": partial(attend_with_dense_mask, q, k, v), "regard": partial(attend_with_rule, q, k, v)}, 2e-6
        )
        memory = [in_a_fresh_process(name, way) for way in ("dense", "regard")]
        training = {
            name: forward_and_backward(partial(run, *leaves), leaves)
            for name, run in (("dense", attend_with_dense_mask), ("regard", attend_with_rule))
        }
        both = time_contenders(training, 2e-4)
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


def in_a_fresh_process(name: str, way: str) -> float | None:
    """The peak megabytes of one way, forward."""
    ran = subprocess.run([sys.executable, "-m", "benchmarks.rules", name, way], capture_output=True, text=True, check=True)
    return float(ran.stdout) if ran.stdout.strip() else None


def print_peak(name: str, way: str) -> None:
    """What the fresh process prints; what a dense mask costs in memory includes the mask."""
    q, k, v = (torch.randn(1, HEADS, T, WIDTH) for _ in range(3))
    rule = RULES[name]
    F.scaled_dot_product_attention(q[:, :, :8], k[:, :, :8], v[:, :, :8])  # what torch sets up at its first call
    ways = {
        "dense": lambda: F.scaled_dot_product_attention(q, k, v, rule.table(T, T)),
        "regard": lambda: attention(q, k, v, rule),
    }
    print(measure_peak_megabytes(ways[way]) or "")


if __name__ == "__main__":
    print_peak(*sys.argv[1:])
