"""The door of flex_attention: its block mask as a rule, its change of scores as a softcap and a bias.

Compiled or not, it runs as compiled code of torch's, and is looked at when that begins, whoever holds it in whatever way.
To change what it computes, the names under which modules hold it must stand for ours.
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

COMPILED_FROM = "_torchdynamo_orig_callable"  # where torch.compile notes what it compiled
MODULE = "torch.nn.attention.flex_attention"
EAGER = "_flex_attention_hop_wrapper"  # what it compiles of itself where nobody compiled it
HELD = "it is held where it cannot be changed: let a name of a Python module, or an attribute of a torch module, hold it"
NAMES = Names(list)


class StandIn:
    """flex_attention, or what torch.compile made of it, with our door before it; copied and pickled as what it stands for."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        setattr(self, COMPILED_FROM, vars(function).get(COMPILED_FROM, function))  # torch.compile of ours compiles what it is
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return enter(self.function, *args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Callable[..., Any]:
        return self.function

    def __reduce__(self) -> str:
        return self.function.__name__


def original() -> Any:
    """flex_attention itself; None where nobody has imported it."""
    found = getattr(sys.modules.get(MODULE), "flex_attention", None)
    return found.function if isinstance(found, StandIn) else found


def patches(model: nn.Module) -> list[Patch]:
    """What stands in for flex_attention wherever a Python module, or a part of this model, holds it."""
    flex = original()
    if flex is None:
        return []
    holders = [one for one in list(sys.modules.values()) if isinstance(one, ModuleType)]
    held = [(one, *item) for one in (*holders, *model.modules()) for item in list(vars(one).items()) if is_flex(item[1], flex)]
    made = {id(value): StandIn(value) for _, _, value in held}
    return [(holder, name, made[id(value)]) for holder, name, value in held]


def is_flex(value: Any, flex: Any) -> bool:
    """Whether a value is flex_attention, or what torch.compile made of it."""
    return value is flex or (type(value) is FunctionType and value.__dict__.get(COMPILED_FROM) is flex)


def enter(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """flex_attention(q, k, v, score_mod, block_mask, scale, enable_gqa, ...) on its way."""

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
    """The call in our terms."""
    made_apart = apart(SCENE.frames, query, key)
    q, k, v = plain(query), plain(key), plain(value)
    b = max(q.shape[0], k.shape[0])
    q, k, v = (x if x.shape[0] == b else x.expand(b, -1, -1, -1) for x in (q, k, v))
    rule, offset, bias, softcap = rule_of(block_mask, score_mod, q, k)
    bias = None if bias is None else plain(bias)
    return Passage("flex", q, k, v, rule, scale, softcap, bias, offset=offset, apart=made_apart)


def looked_at(function: Any, args: Any, kwargs: Any) -> bool:
    """Whether a compiled function that begins is flex_attention: then it has been looked at."""
    if function is None or (function is not original() and getattr(function, "__name__", "") != EAGER):
        return False
    if any(watcher.changes for watcher in SCENE.watchers):
        missed("flex_attention", HELD)
    else:
        enter(lambda *args, **kwargs: None, *args, **kwargs)
    return True


def of_block_mask(block_mask: Any, q: Tensor, k: Tensor) -> tuple[Mask, int] | None:
    """The rule of a block mask and its offset; None where it is none."""
    return rule_of(block_mask, None, q, k)[:2] if hasattr(block_mask, "mask_mod") else None
