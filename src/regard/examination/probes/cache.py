"""Cache: decoding token by token gives what the full forward gives, where the subject takes a cache."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from regard.examination import evidence, reach
from regard.examination.case import Case
from regard.examination.report import Checked, Finding, Unknown
from regard.examination.subjects import answered
from regard.generate.cache import Cache
from regard.mechanism import Causal

NAMES = ("past", "layer_past", "past_key_value", "past_key_values", "past_kv", "kv_cache", "cache", "past_kv_cache")
ONE_BY_ONE, SEVERAL = (1,) * 6, (3, 1, 2)  # tokens at a time
SLACK = 1e3  # times rounding: other shapes are added up in another order
CURE = (
    "Give the new keys and values the place after the cached ones, cat((past, new), dim=-2), and each query the position it "
    "has among all tokens: is_causal=True counts from the first key, so it hides the cache."
)

Decode = Callable[[nn.Module, Tensor, Sequence[int]], Tensor]


def look(case: Case) -> Iterator[Finding | Checked | Unknown]:
    """What decoding differs by from the full forward."""
    module, subject = case.subject.module, case.subject
    if module is None or subject.again is None or subject.rank != 3 or not case.free or case.expects != Causal():
        return
    taken = next((name for name in NAMES if name in inspect.signature(module.forward).parameters), None)
    if taken is None or case.shapes.tokens != sum(SEVERAL):
        return
    (x,) = case.usual()
    full = case.ask(x).context
    decode = next((way for way in (by_rule, by_value(taken)) if works(way, module, x)), None)
    if decode is None:
        yield Unknown(
            f"whether decoding with its `{taken}` is the full forward", "a cache of a form that it takes, to a test of your own"
        )
        return
    noise = SLACK * reach.rounding(x.dtype) * float(full.abs().max())
    for steps, how in ((ONE_BY_ONE, "token by token"), (SEVERAL, "several tokens at a time")):
        if steps == SEVERAL and not works(decode, module, x, SEVERAL):
            continue  # refusing is no fault
        change = (decode(module, x, steps) - full).double().abs().amax((0, 2))
        wrong = ~(change <= noise)
        if wrong.any():
            i = int(wrong.int().argmax())
            told = f"decoding {how} with its cache, output {evidence.token(case, i)} is {change[i]:.2g} from the full forward's"
            yield Finding("wrong cache", told, CURE, cause="cache")
            return
    yield Checked("decoding with its cache is the full forward", f"a difference of {noise:.0e} would have shown")


def works(decode: Decode, module: nn.Module, x: Tensor, steps: Sequence[int] = ONE_BY_ONE) -> bool:
    """Whether the module takes its cache in this way."""
    try:
        return decode(module, x, steps).shape[:2] == x.shape[:2]
    except Exception:  # another form of cache than this
        return False


def by_rule(module: nn.Module, x: Tensor, steps: Sequence[int]) -> Tensor:
    """Outputs by a cache of regard's: `past` puts the keys and values before the new ones."""
    cache = Cache(1, x.shape[1])
    outputs = []
    with torch.no_grad():
        for part in x.split(list(steps), 1):
            cache.extend(torch.zeros(part.shape[:2], dtype=torch.long))
            outputs.append(answered(module(part, past=cache.layer(0)), part.shape[1]).context)
    return torch.cat(outputs, 1)


def by_value(name: str) -> Decode:
    """Outputs by a cache that a module returns and takes again."""

    def decode(module: nn.Module, x: Tensor, steps: Sequence[int]) -> Tensor:
        asks = {"use_cache": True} if "use_cache" in inspect.signature(module.forward).parameters else {}
        past, outputs = None, []
        with torch.no_grad():
            for part in x.split(list(steps), 1):
                returned = module(part, **{name: past}, **asks)
                outputs.append(answered(returned, part.shape[1]).context)
                past = held(returned)
        return torch.cat(outputs, 1)

    return decode


def held(returned: Any) -> Any:
    """The cache among what a module returned: a pair of keys and values, or an object that is no tensor."""
    if not isinstance(returned, (tuple, list)):
        raise TypeError("it returns no cache")
    found = [one for one in returned[1:] if one is not None and not isinstance(one, Tensor)]
    if not found:
        raise TypeError("it returns no cache")
    return found[-1]
