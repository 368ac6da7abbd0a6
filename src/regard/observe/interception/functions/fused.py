"""Interception of regard.attention, whose arguments state the whole call."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from regard.mechanism.mask_algebra import EVERYTHING
from regard.mechanism.request import make_request
from regard.observe.interception.attention_call import AttentionCall, CallAdapter
from regard.observe.interception.call_dispatch import dispatch_call
from regard.observe.interception.forward_cache import infer_once
from regard.observe.interception.functions.beam_rows import find_parent_rows
from regard.observe.interception.plain_tensors import unwrap_tensor
from regard.observe.interception.provenance import has_separate_sources
from regard.observe.interception.thread_state import STATE


def intercept_attention(func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Intercept a call of regard.attention."""

    def run() -> Tensor:
        return func(*args, **kwargs)

    def read_call() -> tuple[AttentionCall, CallAdapter]:
        arguments = {"mask": EVERYTHING, **dict(zip(("q", "k", "v", "mask"), args, strict=False)), **kwargs}
        are_separate = has_separate_sources(STATE.frames, arguments["q"], arguments["k"])
        arguments = {name: unwrap_tensor(x) if isinstance(x, Tensor) else x for name, x in arguments.items()}
        q, k, v, mask, scale, softcap, bias, sinks, offset, dropout, *_ = make_request(**arguments)
        bias = None if bias is None else copy_bias(bias, q, k)
        scoring: dict[str, Any] = {
            "mask": mask,
            "offset": offset,
            "scale": scale,
            "softcap": softcap,
            "bias": bias,
            "sinks": sinks,
        }
        call = AttentionCall(kernel="regard", q=q, k=k, v=v, dropout=dropout, has_separate_sources=are_separate, **scoring)
        call.parent_rows = find_parent_rows(STATE.frames[-1].args)
        four = (*q.shape[:3], v.shape[3])
        return call, CallAdapter(run, lambda out: unwrap_tensor(out).view(four), lambda new, out: new.view(out.shape))

    result: Tensor = dispatch_call("regard.attention", run, read_call)
    return result


def copy_bias(bias: Tensor, q: Tensor, k: Tensor) -> Tensor | None:
    """Return a copy of a bias, one per forward for all layers that share it."""
    return infer_once((bias,), q, k, lambda: (EVERYTHING, 0, bias.detach().clone()), "bias")[2]
