"""Interception of flex_attention: its block mask becomes a rule, its score_mod a softcap and a bias.

Eager or compiled, flex_attention runs as compiled code of torch, so it is intercepted where that code starts, whatever name
holds it. To change what it computes, the names that hold it in modules must be patched.
"""

import functools
import sys
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

from regard.mechanism.mask_algebra import Mask
from regard.observe.interception.attention_call import AttentionCall, CallAdapter
from regard.observe.interception.call_dispatch import dispatch_call, report_missed
from regard.observe.interception.functions.flex_mods import infer_flex_rule
from regard.observe.interception.patching import AttributePatch, PatchSet
from regard.observe.interception.plain_tensors import unwrap_tensor
from regard.observe.interception.provenance import has_separate_sources
from regard.observe.interception.thread_state import STATE

COMPILED_FROM = "_torchdynamo_orig_callable"  # the attribute in which torch.compile keeps the original
MODULE = "torch.nn.attention.flex_attention"
EAGER = "_flex_attention_hop_wrapper"  # what eager flex_attention compiles
HELD = "it is stored where it cannot be replaced: store it as a name of a Python module, or as an attribute of a torch module"
FLEX_PATCHES = PatchSet(list)


class FlexWrapper:
    """A wrapper of flex_attention, or of its compiled form; copying or pickling it gives the original."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        setattr(self, COMPILED_FROM, vars(function).get(COMPILED_FROM, function))  # torch.compile compiles the original
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return intercept_flex(self.function, *args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Callable[..., Any]:
        return self.function

    def __reduce__(self) -> str:
        return self.function.__name__


def find_flex_attention() -> Any:
    """Return flex_attention itself; None if it has not been imported."""
    function = getattr(sys.modules.get(MODULE), "flex_attention", None)
    return function.function if isinstance(function, FlexWrapper) else function


def build_patches(model: nn.Module) -> list[AttributePatch]:
    """Return attribute patches for every module of Python or of this model that holds flex_attention, compiled or not."""
    flex = find_flex_attention()
    if flex is None:
        return []
    holders = [one for one in list(sys.modules.values()) if isinstance(one, ModuleType)]
    held = [
        (holder, name, value)
        for holder in (*holders, *model.modules())
        for name, value in list(vars(holder).items())
        if value is flex or (type(value) is FunctionType and value.__dict__.get(COMPILED_FROM) is flex)
    ]
    made = {id(value): FlexWrapper(value) for _, _, value in held}
    return [(holder, name, made[id(value)]) for holder, name, value in held]


def intercept_flex(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Intercept flex_attention(q, k, v, score_mod, block_mask, scale, enable_gqa, ...)."""

    def run() -> Any:
        return function(*args, **kwargs)

    def get_context(out: Any) -> Tensor:
        found: Tensor = unwrap_tensor(out[0] if isinstance(out, tuple) else out)
        return found

    def build_result(new: Tensor, out: Any) -> Any:
        return (new, *out[1:]) if isinstance(out, tuple) else new

    return dispatch_call(
        "flex_attention", run, lambda: (read_call(*args, **kwargs), CallAdapter(run, get_context, build_result))
    )


def read_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Any = None,
    block_mask: Any = None,
    scale: Any = None,
    *_: Any,
    **__: Any,
) -> AttentionCall:
    """Read the call."""
    are_separate = has_separate_sources(STATE.frames, query, key)
    q, k, v = unwrap_tensor(query), unwrap_tensor(key), unwrap_tensor(value)
    b = max(q.shape[0], k.shape[0])
    q, k, v = (x if x.shape[0] == b else x.expand(b, -1, -1, -1) for x in (q, k, v))
    rule, offset, bias, softcap = infer_flex_rule(block_mask, score_mod, q, k)
    bias = None if bias is None else unwrap_tensor(bias)
    scoring: dict[str, Any] = {"mask": rule, "offset": offset, "scale": scale, "softcap": softcap, "bias": bias}
    return AttentionCall(kernel="flex", q=q, k=k, v=v, has_separate_sources=are_separate, **scoring)


def intercept_compiled(function: Any, args: Any, kwargs: Any) -> bool:
    """Return whether a compiled function that starts is flex_attention, after recording its call.

    The call is reported as missed where a watcher wants to change it.
    """
    if function is None or (function is not find_flex_attention() and getattr(function, "__name__", "") != EAGER):
        return False
    if any(watcher.can_change_calls for watcher in STATE.watchers):
        report_missed("flex_attention", HELD)
    else:
        intercept_flex(lambda *args, **kwargs: None, *args, **kwargs)
    return True


def infer_block_mask(block_mask: Any, q: Tensor, k: Tensor) -> tuple[Mask, int] | None:
    """Return the rule and offset of a block mask; None if it is no block mask."""
    return infer_flex_rule(block_mask, None, q, k)[:2] if hasattr(block_mask, "mask_mod") else None
