"""On a GPU: rules handed over as rules against the same rules as a dense mask of T x T."""

from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.gpu_maps import measure_gpu_megabytes
from benchmarks.rules import HEADS, RULES, WIDTH, T
from benchmarks.tables import Table
from benchmarks.timing import forward_and_backward, measure_seconds, time_contenders
from regard import attention
from regard.mechanism import choose

TITLE = "rules on a GPU against a dense mask, T = 8192, 12 heads of 64"
COLUMNS = ["dtype", "rule", "kernel", "first call s", "dense ms", "regard ms", "times faster", "dense MiB", "regard MiB"]
TOLERANCES = {
    torch.float32: (2e-5, 1e-3),
    torch.bfloat16: (3e-2, 5e-1),
}  # forward, and the gradients of sums over 8,192 queries


def run(peak: dict[torch.dtype, float]) -> Table:
    """Seconds of the first call, which compiles; milliseconds forward and both, and memory; the dense mask is made outside."""
    table = Table(TITLE, [*COLUMNS, "dense both ms", "regard both ms", "times faster both"])
    for dtype, (forward_tolerance, tolerance) in TOLERANCES.items():
        torch.manual_seed(0)
        leaves = [torch.randn(1, HEADS, T, WIDTH, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3)]
        inputs = [leaf.detach() for leaf in leaves]
        for name, rule in RULES.items():
            dense = rule.table(T, T).cuda()

            def attend_with_dense_mask(q, k, v, dense=dense):
                return F.scaled_dot_product_attention(q, k, v, dense)

            def attend_with_rule(q, k, v, rule=rule):
                return attention(q, k, v, rule)

            ways = {"dense": attend_with_dense_mask, "regard": attend_with_rule}
            first = measure_seconds(partial(attend_with_rule, *inputs))
            forward = time_contenders({one: partial(run, *inputs) for one, run in ways.items()}, forward_tolerance, within=1.0)
            memory = [measure_gpu_megabytes(partial(run, *inputs)) for run in ways.values()]
            training = {one: forward_and_backward(partial(run, *leaves), leaves) for one, run in ways.items()}
            both = time_contenders(training, tolerance, within=1.0)
            times, together = ([*found.medians.values()] for found in (forward, both))
            cells = [*times, times[0] / times[1], *memory, *together, together[0] / together[1]]
            table.add(str(dtype)[6:], name, choose(*inputs, rule).kernel, first, *cells)
    return table
