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

from regard.mechanism.rule import Mask
from regard.observe.doors.lineage import apart
from regard.observe.doors.names import Names, Patch
from regard.observe.doors.passage import Crossing, Passage
from regard.observe.doors.plain import plain
from regard.observe.doors.scene import SCENE, meet, missed
from regard.observe.doors.written_out import rule_of

COMPILED_FROM = "_torchdynamo_orig_callable"  # the attribute in which torch.compile keeps the original
MODULE = "torch.nn.attention.flex_attention"
EAGER = "_flex_attention_hop_wrapper"  # what eager flex_attention compiles
HELD = "it is held where it cannot be changed: let a name of a Python module, or an attribute of a torch module, hold it"
NAMES = Names(list)


class StandIn:
    """A wrapper of flex_attention, or of its compiled form; copying or pickling it gives the original."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        setattr(self, COMPILED_FROM, vars(function).get(COMPILED_FROM, function))  # torch.compile compiles the original
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return enter(self.function, *args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Callable[..., Any]:
        return self.function

    def __reduce__(self) -> str:
        return self.function.__name__


def original() -> Any:
    """Return flex_attention itself; None if it has not been imported."""
    found = getattr(sys.modules.get(MODULE), "flex_attention", None)
    return found.function if isinstance(found, StandIn) else found


def patches(model: nn.Module) -> list[Patch]:
    """Return attribute patches for every Python module, and every part of this model, that holds flex_attention."""
    flex = original()
    if flex is None:
        return []
    holders = [one for one in list(sys.modules.values()) if isinstance(one, ModuleType)]
    held = [(one, *item) for one in (*holders, *model.modules()) for item in list(vars(one).items()) if is_flex(item[1], flex)]
    made = {id(value): StandIn(value) for _, _, value in held}
    return [(holder, name, made[id(value)]) for holder, name, value in held]


def is_flex(value: Any, flex: Any) -> bool:
    """Return whether a value is flex_attention or its compiled form."""
    return value is flex or (type(value) is FunctionType and value.__dict__.get(COMPILED_FROM) is flex)


def enter(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Intercept flex_attention(q, k, v, score_mod, block_mask, scale, enable_gqa, ...)."""

    def run() -> Any:
        return function(*args, **kwargs)

    def context(out: Any) -> Tensor:
        found: Tensor = plain(out[0] if isinstance(out, tuple) else out)
        return found

    def result(new: Tensor, out: Any) -> Any:
        return (new, *out[1:]) if isinstance(out, tuple) else new

    return meet("flex_attention", run, lambda: (understood(*args, **kwargs), Crossing(run, context, result)))


def understood(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Any = None,
    block_mask: Any = None,
    scale: Any = None,
    *_: Any,
    **__: Any,
) -> Passage:
    """Read the call."""
    made_apart = apart(SCENE.frames, query, key)
    q, k, v = plain(query), plain(key), plain(value)
    b = max(q.shape[0], k.shape[0])
    q, k, v = (x if x.shape[0] == b else x.expand(b, -1, -1, -1) for x in (q, k, v))
    rule, offset, bias, softcap = rule_of(block_mask, score_mod, q, k)
    bias = None if bias is None else plain(bias)
    return Passage("flex", q, k, v, rule, scale, softcap, bias, offset=offset, apart=made_apart)


def looked_at(function: Any, args: Any, kwargs: Any) -> bool:
    """Return whether a compiled function that starts is flex_attention, after recording its call.

    The call is reported as missed where a watcher wants to change it.
    """
    if function is None or (function is not original() and getattr(function, "__name__", "") != EAGER):
        return False
    if any(watcher.changes for watcher in SCENE.watchers):
        missed("flex_attention", HELD)
    else:
        enter(lambda *args, **kwargs: None, *args, **kwargs)
    return True


def of_block_mask(block_mask: Any, q: Tensor, k: Tensor) -> tuple[Mask, int] | None:
    """Return the rule and offset of a block mask; None if it is no block mask."""
    return rule_of(block_mask, None, q, k)[:2] if hasattr(block_mask, "mask_mod") else None
