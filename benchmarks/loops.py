"""The compiled loops of attention beside torch's kernel on this processor, whichever `attention` would choose.

Equal are the contexts, and the gradients of q, k and v. The choices of `regard.compiled.kernel_choice` follow from this table.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.kernels import HEADS, TOLERANCE, WIDTH
from benchmarks.tables import Table
from benchmarks.timing import forward_and_backward, time_contenders
from regard import Causal, Everything, Window, attention
from regard.compiled import kernel_choice

TITLE = "The compiled loops of attention beside torch's kernel, 12 heads of 64, milliseconds"
COLUMNS = ["dtype", "mask", "T", "torch ms", "loops ms", "loops / torch", "both: torch", "both: loops", "loops / torch of both"]
MASKS = {"none": Everything(), "causal": Causal(), "window of 256": Window(256)}
LENGTHS = (256, 512, 1024, 2048, 4096)


def run(peak: dict[torch.dtype, float]) -> Table:
    """Milliseconds of both, forward, and forward and backward together."""
    table = Table(TITLE, COLUMNS)
    for dtype in (torch.float32, torch.bfloat16):
        for name, mask in MASKS.items():
            for t in LENGTHS:
                leaves = [torch.randn(1, HEADS, t, WIDTH).to(dtype).requires_grad_() for _ in range(3)]
                plain = [x.detach() for x in leaves]
                ways = {way: force(way, partial(attention, *plain, mask)) for way in ("torch", "loops")}
                forward = time_contenders(ways, TOLERANCE[dtype]).medians
                learning = {
                    way: force(way, forward_and_backward(partial(attention, *leaves, mask), leaves))
                    for way in ("torch", "loops")
                }
                both = time_contenders(learning, 100 * TOLERANCE[dtype]).medians
                ratios = forward["loops"] / forward["torch"], both["loops"] / both["torch"]
                table.add(str(dtype)[6:], name, t, forward["torch"], forward["loops"], ratios[0], *both.values(), ratios[1])
    return table


def force(way: str, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """A run that takes the compiled loops, or torch's kernel."""

    def run_forced() -> Tensor:
        chosen = kernel_choice.is_torch_attention_faster
        kernel_choice.is_torch_attention_faster = lambda *_: way == "torch"
        try:
            return compute()
        finally:
            kernel_choice.is_torch_attention_faster = chosen

    return run_forced
