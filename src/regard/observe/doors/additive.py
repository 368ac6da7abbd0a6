"""Interception of additive attention: its function, and its layer where a decoder bypasses the layer's forward.

A decoder calls `AdditiveAttention.over` once a step, often outside of any module; such a call counts as a call of the layer.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard.layers.additive import AdditiveAttention
from regard.mechanism.additive import additive_attention
from regard.mechanism.additive import asked as request
from regard.mechanism.request import exactly
from regard.mechanism.rule import EVERYTHING, Mask, Offset
from regard.observe.doors.lineage import apart
from regard.observe.doors.names import Patch
from regard.observe.doors.passage import Crossing, Passage
from regard.observe.doors.plain import plain
from regard.observe.doors.scene import SCENE, begin, end, look_around, meet
from regard.observe.doors.states import turned


def of_additive(func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Intercept a call of additive_attention."""

    def run() -> Tensor:
        return func(*args, **kwargs)

    result: Tensor = meet("additive_attention", run, lambda: understood(run, *args, **kwargs))
    return result


def understood(
    run: Callable[[], Tensor], q: Tensor, k: Tensor, v: Tensor, weight: Tensor, mask: Mask = EVERYTHING, *, offset: Offset = 0
) -> tuple[Passage, Crossing]:
    """Read the call.

    It is self-attention only where q and k have equal lengths and were made from the same tensor in the innermost module.
    """
    made_apart = apart(SCENE.frames[-1:], q, k)
    q, k, v, weight = (plain(x) for x in (q, k, v, weight))
    with exactly(q.device):  # computed without torch.autocast
        found = request(q, k, v, weight, mask, offset)
    passage = Passage("additive", found.q, found.k, found.v, found.mask, 1.0, offset=found.offset, weight=weight)
    passage.crosses = made_apart is not False or found.q.shape[2] != found.k.shape[2]
    passage.caches, passage.stepwise, passage.turned = False, True, turned(SCENE.frames[-1].args)
    four = (*found.q.shape[:3], found.v.shape[3])
    return passage, Crossing(run, lambda out: plain(out).view(four), lambda new, out: new.view(out.shape))


DOORS: dict[Any, Callable[..., Any]] = {additive_attention: of_additive}


def patches() -> list[Patch]:
    """Return the attribute patch for `AdditiveAttention.over`, which bypasses the layer's forward."""
    passed = vars(AdditiveAttention)["over"]

    def over(self: AdditiveAttention, *args: Any, **kwargs: Any) -> Tensor:
        if not SCENE.frames:
            look_around()
        running = SCENE.frames and SCENE.frames[-1].module is self
        return passed(self, *args, **kwargs) if running or not SCENE.live else framed(passed, self, *args, **kwargs)

    return [(AdditiveAttention, "over", over)]


def framed(call: Callable[..., Tensor], module: AdditiveAttention, *args: Any, **kwargs: Any) -> Tensor:
    """Run the method that bypasses a layer's forward as a call of the layer, inside a new frame."""
    frame = begin(module, args, kwargs)
    try:
        output = call(module, *args, **kwargs)
    finally:
        end(frame)
    if SCENE.frames:
        with torch._C.DisableTorchFunction():
            SCENE.frames[-1].note(args, kwargs, output, child=True)
    return output
