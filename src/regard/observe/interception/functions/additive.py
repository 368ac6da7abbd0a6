"""Interception of additive attention: its function, and its layer where a decoder bypasses the layer's forward.

A decoder calls `AdditiveAttention.attend_projected` once a step, often outside of any module; such a call counts as a call of
the layer.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard.layers.additive import AdditiveAttention
from regard.mechanism.additive import additive_attention
from regard.mechanism.additive import make_additive_request as request
from regard.mechanism.mask_algebra import EVERYTHING, Mask, Offset
from regard.mechanism.request import disable_autocast
from regard.observe.interception.attention_call import AttentionCall, CallAdapter
from regard.observe.interception.call_dispatch import dispatch_call
from regard.observe.interception.functions.beam_rows import find_parent_rows
from regard.observe.interception.patching import AttributePatch
from regard.observe.interception.plain_tensors import unwrap_tensor
from regard.observe.interception.provenance import has_separate_sources
from regard.observe.interception.thread_state import STATE, activate_watchers, pop_frame, push_frame


def intercept_additive(func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Intercept a call of additive_attention."""

    def run() -> Tensor:
        return func(*args, **kwargs)

    result: Tensor = dispatch_call("additive_attention", run, lambda: read_call(run, *args, **kwargs))
    return result


def read_call(
    run: Callable[[], Tensor], q: Tensor, k: Tensor, v: Tensor, weight: Tensor, mask: Mask = EVERYTHING, *, offset: Offset = 0
) -> tuple[AttentionCall, CallAdapter]:
    """Read the call.

    It is self-attention only where q and k have equal lengths and were made from the same tensor in the innermost module.
    """
    are_separate = has_separate_sources(STATE.frames[-1:], q, k)
    q, k, v, weight = (unwrap_tensor(x) for x in (q, k, v, weight))
    with disable_autocast(q.device):  # computed without torch.autocast
        request_of_call = request(q, k, v, weight, mask, offset)
    arguments: dict[str, Any] = {name: getattr(request_of_call, name) for name in ("q", "k", "v", "mask", "offset")}
    call = AttentionCall(kernel="additive", **arguments, scale=1.0, weight=weight)
    call.is_cross = are_separate is not False or request_of_call.q.shape[2] != request_of_call.k.shape[2]
    call.can_use_cache, call.is_stepwise, call.parent_rows = False, True, find_parent_rows(STATE.frames[-1].args)
    four = (*request_of_call.q.shape[:3], request_of_call.v.shape[3])
    return call, CallAdapter(run, lambda out: unwrap_tensor(out).view(four), lambda new, out: new.view(out.shape))


WRAPPERS: dict[Any, Callable[..., Any]] = {additive_attention: intercept_additive}


def build_patches() -> list[AttributePatch]:
    """Return the attribute patch for `AdditiveAttention.attend_projected`, which bypasses the layer's forward."""
    passed = vars(AdditiveAttention)["attend_projected"]

    def intercept_over(self: AdditiveAttention, *args: Any, **kwargs: Any) -> Tensor:
        if not STATE.frames:
            activate_watchers()
        running = STATE.frames and STATE.frames[-1].module is self
        return passed(self, *args, **kwargs) if running or not STATE.is_active else call_in_frame(passed, self, *args, **kwargs)

    return [(AdditiveAttention, "attend_projected", intercept_over)]


def call_in_frame(call: Callable[..., Tensor], module: AdditiveAttention, *args: Any, **kwargs: Any) -> Tensor:
    """Run the method that bypasses a layer's forward as a call of the layer, inside a new frame."""
    frame = push_frame(module, args, kwargs)
    try:
        output = call(module, *args, **kwargs)
    finally:
        pop_frame(frame)
    if STATE.frames:
        with torch._C.DisableTorchFunction():
            STATE.frames[-1].log_operation(args, kwargs, output, child=type(module))
    return output
