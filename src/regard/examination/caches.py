"""Caches: the forms in which a module takes what it has seen, and what it gives when a sequence comes in parts."""

import inspect
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.examination import reach
from regard.examination.answers import parts_of
from regard.examination.case import doubled
from regard.examination.kept import keep
from regard.examination.report import Checked, Finding, Unknown
from regard.examination.tokens import COPIED
from regard.generate.cache import Cache

NAMES = ("past", "layer_past", "past_key_value", "past_key_values", "past_kv", "kv_cache", "cache", "past_kv_cache")
COUNTS = ("start_pos", "offset", "past_length")  # the places of new tokens, given as the number of those before
WHERE = (*COUNTS, "input_pos", "position_ids", "positions", "cache_position")
TOKENS = 6
SLACK = 1e3  # times rounding: other shapes are added up in another order
LEAST = 2e-6  # of the largest output: layers may compute in float32 inside
COARSE = 1e-2  # of the largest output, beyond which nothing would show
WHAT = "decoding with its cache is the full forward"
CURE = (
    "Give the new keys and values the place after the cached ones, cat((past, new), dim=-2), and each query the position it "
    "has among all tokens: is_causal=True counts from the first key, so it hides the cache. Or refuse several tokens at a time."
)

Read = Callable[[Any, Tensor], Tensor]  # what a module returned for a part of its inputs, to outputs (b, t, n)


class Asked(NamedTuple):
    """A module that takes a cache as the argument `name`, and its inputs x, (b, t) ids or (b, t, c)."""

    module: nn.Module
    name: str
    x: Tensor
    read: Read

    @property
    def takes(self) -> set[str]:
        """The names of what it takes."""
        return set(inspect.signature(self.module.forward).parameters)


Step = Callable[[Tensor, dict[str, Any]], Tensor]  # a part of the inputs, and more that is given, to its outputs
Form = Callable[[Asked], Step]


def compared(
    module: nn.Module, x: Tensor, read: Read, full: Tensor, named: Callable[[int], str]
) -> Iterator[Finding | Checked | Unknown]:
    """What decoding differs by from the full forward, of a module that takes a cache.

    `full` is what the subject gives for x, and `named` says a token by its number.
    """
    name = next((name for name in NAMES if name in inspect.signature(module.forward).parameters), None)
    t = min(x.shape[1], TOKENS)
    if name is None or t < 2:
        return
    what = f"whether decoding with its `{name}` is the full forward"
    if not same(Asked(module, name, x, read), full):
        yield Unknown(what, "the module itself: another call gives other outputs than the module that takes the cache")
        return
    asked = Asked(module, name, x[:, :t], read)
    wider = wide(asked)
    whole = None if wider is None else tried(wider, plainly, (t,))
    if whole is not None and wider is not None:
        asked = wider
    else:
        whole = tried(asked, plainly, (t,))
    if whole is None or close(asked) > COARSE:
        yield Unknown(what, "a sample whose first tokens it takes alone" if whole is None else "the same in float32")
        return
    yield decoded(asked, whole, named) or Unknown(what, "a cache of a form that it takes, to a test of your own")


def decoded(asked: Asked, whole: Tensor, named: Callable[[int], str]) -> Finding | Checked | None:
    """Whether decoding in any form gives the outputs of the full forward; None where no form is taken."""
    t, wrong = asked.x.shape[1], None
    noise = close(asked) * float(whole.abs().max())
    several = asked.x.dim() > 2 and t > 3  # of models some keep states beside attention, that take one token at a time
    for form, placed in itertools.product(FORMS, (False, True)):
        made = tried(asked, form, (1,) * t, placed)
        if made is None:
            continue
        told = differs(made, whole, noise, "token by token", named)
        if told is None and several:
            made = tried(asked, form, (t // 2, 1, t - t // 2 - 1), placed)  # refusing is no fault
            told = None if made is None else differs(made, whole, noise, "several tokens at a time", named)
        if told is None:
            return Checked(WHAT, f"a difference of {noise:.0e} would have shown")
        wrong = wrong or Finding("wrong cache", told, CURE, cause="cache")
    return wrong


def same(asked: Asked, full: Tensor) -> bool:
    """Whether the module gives what the subject gave: no argument of a partial or another function makes it otherwise."""
    made = tried(asked, plainly, (asked.x.shape[1],))
    if made is None or made.shape != full.shape:
        return False
    return float((made - full).abs().max()) <= close(asked) * float(full.abs().max())


def close(asked: Asked) -> float:
    """The difference, of the largest output, that may be rounding."""
    dtype = next((one.dtype for one in asked.module.parameters() if one.is_floating_point()), torch.float32)
    return max(SLACK * reach.rounding(dtype), LEAST)


def differs(made: Tensor, whole: Tensor, noise: float, how: str, named: Callable[[int], str]) -> str | None:
    """The first output that is another, in words; None where there is none."""
    change = (made - whole).double().abs().amax((0, 2))
    wrong = ~(change <= noise)
    if not wrong.any():
        return None
    i = int(wrong.int().argmax())
    return f"decoding {how} with its cache, output {named(i)} is {change[i]:.2g} from the full forward's"


def wide(asked: Asked) -> Asked | None:
    """The same in float64; None of a large module, or one that cannot be copied."""
    if sum(one.numel() for one in asked.module.parameters()) > COPIED:
        return None
    module = doubled(asked.module)
    return (
        None
        if module is None
        else asked._replace(module=module, x=asked.x.double() if asked.x.is_floating_point() else asked.x)
    )


def tried(asked: Asked, form: Form, steps: Sequence[int], placed: bool = False) -> Tensor | None:
    """The outputs of x in steps of so many tokens, side by side; None where the module does not take them in this form."""
    where = [name for name in WHERE if name in asked.takes]
    if placed and not where:
        return None
    kept, outputs, before = keep(asked.module), [], 0
    try:
        with torch.no_grad():
            step = form(asked)
            for part in asked.x.split(list(steps), 1):
                given = {name: at(name, before, part) for name in where} if placed else {}
                outputs.append(step(part.clone(), given))
                before += part.shape[1]
        made = torch.cat(outputs, 1)
    except Exception:  # another form of cache than this
        return None
    finally:
        kept.put_back()
    return made if made.shape[:2] == asked.x.shape[:2] else None


def at(name: str, before: int, part: Tensor) -> Any:
    """The places of the next tokens, as an argument of this name has them."""
    places = torch.arange(before, before + part.shape[1], device=part.device)
    return before if name in COUNTS else places[None] if name.startswith("position") else places


def plainly(asked: Asked) -> Step:
    """No cache: the full forward."""
    return lambda part, given: asked.read(asked.module(part), part)


def of_regard(asked: Asked) -> Step:
    """A cache of regard's: a model takes it whole, a layer its `past`, which puts the keys and values before the new ones."""
    cache, layer = Cache(sum(1 for _ in asked.module.modules()), TOKENS), asked.x.dim() > 2
    calls = 0

    def past(k: Tensor, v: Tensor) -> Any:
        nonlocal calls
        calls += 1
        return cache.layer(0)(k, v)

    def step(part: Tensor, given: dict[str, Any]) -> Tensor:
        before, called = cache.longest, calls
        if layer:
            cache.extend(torch.zeros(part.shape[:2], dtype=torch.long))
        returned = asked.module(part, **{asked.name: past if layer else cache}, **given)
        if cache.longest != before + part.shape[1] or (layer and calls == called):
            raise TypeError("it did not use the cache")
        return asked.read(returned, part)

    return step


def handed_back(asked: Asked) -> Step:
    """A cache that the module returns and takes again."""
    past = None

    def step(part: Tensor, given: dict[str, Any]) -> Tensor:
        nonlocal past
        returned = asked.module(part, **{asked.name: past}, **given, **asking(asked))
        past = returned_cache(returned, asked.name)
        return asked.read(returned, part)

    return step


def of_hugging_face(asked: Asked) -> Step:
    """A layer of Hugging Face's with their Cache, one token at a time: a mask for several is its model's to make."""
    cache = sys.modules["transformers"].DynamicCache()
    layer = next((part.layer_idx for part in asked.module.modules() if isinstance(getattr(part, "layer_idx", None), int)), 0)
    before = 0

    def step(part: Tensor, given: dict[str, Any]) -> Tensor:
        nonlocal before
        if part.shape[1] > 1 or asked.x.dim() == 2:
            raise TypeError("it is given no mask")
        before += 1
        returned = asked.module(part, **{asked.name: cache}, **given, **asking(asked))
        if cache.get_seq_length(layer) != before:
            raise TypeError("it did not fill the cache")
        return asked.read(returned, part)

    return step


FORMS: tuple[Form, ...] = (of_regard, handed_back, of_hugging_face)


def asking(asked: Asked) -> dict[str, bool]:
    """What asks a module for its cache."""
    return {"use_cache": True} if "use_cache" in asked.takes else {}


def returned_cache(returned: Any, name: str) -> Any:
    """The cache among what a module returned: what is named so, or the first that is no tensor and holds some."""
    if isinstance(returned, Mapping) and returned.get(name) is not None:
        return returned[name]
    found = [one for one in parts_of(returned)[1:] if not isinstance(one, Tensor) and holding(one)]
    if not found:
        raise TypeError("it returns no cache")
    return found[0]


def holding(one: Any) -> bool:
    """Whether something holds a tensor: a container, or an object."""
    if isinstance(one, (list, tuple, dict)):
        return any(isinstance(each, Tensor) or holding(each) for each in (one.values() if isinstance(one, dict) else one))
    return hasattr(one, "__dict__")
