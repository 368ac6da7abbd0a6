"""Decode with a module's cache, in each form in which modules take one, and compare with the full forward."""

import inspect
import itertools
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.examination import dependency
from regard.examination.case import copy_module_as_double
from regard.examination.report import Checked, Finding, Unknown
from regard.examination.subject.attention_output import list_parts
from regard.examination.subject.restore_state import take_snapshot
from regard.examination.subject.token_model import COPIED
from regard.examination.whole_models import decoding_causes
from regard.generate.kv_cache import Cache
from regard.matmul import QuantizedLinear

CACHE_ARGUMENTS = ("past", "layer_past", "past_key_value", "past_key_values", "past_kv", "kv_cache", "cache", "past_kv_cache")
NO_CACHE = re.compile(r"^use|position|pos$|len|size|mask|index|implementation")  # of arguments that only speak of one
OFFSET_ARGUMENTS = ("start_pos", "offset", "past_length")  # positions of new tokens, given as the number of earlier ones
POSITION_ARGUMENTS = (*OFFSET_ARGUMENTS, "input_pos", "position_ids", "positions", "cache_position")
KEPT_ARGUMENTS = (*POSITION_ARGUMENTS, "use_cache")  # of a module that keeps its cache itself
TOKENS = 6
DEEPEST = 5  # a tensor in containers and objects of a cache
SLACK = 1e3  # times rounding: other shapes are summed in another order
LEAST = 2e-6  # of the largest output: layers may compute in float32 inside
COARSE = 1e-2  # of the largest output, above which no error could be detected
WHAT = "decoding with its cache equals the full forward"
SINGLE, SEVERAL = "token by token", "several tokens at a time"
CURE = (
    "Append the new keys and values to the cached ones, cat((past, new), dim=-2), and give each query its position among all "
    "tokens: is_causal=True counts from the first key, so it hides cached keys. Or raise if several tokens are passed."
)

Read = Callable[[Any, Tensor], Tensor]  # (returned value, part of the inputs) -> outputs (b, t, n)


class CacheRequest(NamedTuple):
    """A module that takes a cache as the argument `name`, and its inputs x, (b, t) ids or (b, t, c).

    Of a module that keeps its cache itself, as LLaMA's own code does, `name` is one of KEPT_ARGUMENTS.
    """

    module: nn.Module
    name: str
    x: Tensor
    read: Read

    @property
    def parameter_names(self) -> set[str]:
        """The parameter names of the module's forward."""
        return set(inspect.signature(self.module.forward).parameters)


Step = Callable[[Tensor, dict[str, Any]], Tensor]  # (part of the inputs, more keyword arguments) -> outputs
Form = Callable[[CacheRequest], Step]


def check_cache(
    module: nn.Module, x: Tensor, read: Read, full: Tensor, format_token: Callable[[int], str]
) -> Iterator[Finding | Checked | Unknown]:
    """Yield how decoding with a cache differs from the full forward; nothing for a module without a cache.

    `full` is the subject's output for x; `format_token` formats a token's number.
    """
    names = list(inspect.signature(module.forward).parameters)
    name = find_cache_argument(names) or next((one for one in KEPT_ARGUMENTS if one in names), None)
    t = min(x.shape[1], TOKENS)
    if name is None or t < 2:
        return
    if name in KEPT_ARGUMENTS and not keeps_tokens(CacheRequest(module, name, x[:, :t], read)):
        return
    what = f"whether decoding with its `{name}` equals the full forward"
    if not has_same_output(CacheRequest(module, name, x, read), full):
        yield Unknown(
            what, "the module itself, without the function around it: its own outputs differ from those that were examined"
        )
        return
    requested = CacheRequest(module, name, x[:, :t], read)
    wider = cast_to_double(requested)
    whole = None if wider is None else run_steps(wider, make_plain_step, (t,))
    if whole is not None and wider is not None:
        requested = wider
    else:
        whole = run_steps(requested, make_plain_step, (t,))
    if whole is None or get_tolerance(requested) > COARSE:
        yield Unknown(what, "a sample whose first tokens it takes alone" if whole is None else "the same module in float32")
        return
    yield check_decoding(requested, whole, format_token) or Unknown(
        what, "a test of your own, with a cache of the type that it takes"
    )


def find_cache_argument(names: Sequence[str]) -> str | None:
    """Return the argument that takes a cache, the usual names first; None without one."""
    others = [name for name in names if re.search(r"(^|_)(cache|past)", name) and not NO_CACHE.search(name)]
    return next((name for name in (*CACHE_ARGUMENTS, *others) if name in names), None)


def keeps_tokens(request: CacheRequest) -> bool:
    """Return whether an output of a module without an argument for a cache depends on the token of an earlier call."""
    other, steps = request.x.clone(), (1,) * request.x.shape[1]
    other[:, 0] = request.x[:, 1]
    for placed in (False, True):
        one = run_steps(request, make_kept_cache_step, steps, placed)
        two = None if one is None else run_steps(request._replace(x=other), make_kept_cache_step, steps, placed)
        if one is not None and two is not None and not torch.equal(one[:, 1:], two[:, 1:]):
            return True
    return False


def check_decoding(request: CacheRequest, whole: Tensor, format_token: Callable[[int], str]) -> Finding | Checked | None:
    """Check whether decoding with some form of cache gives the full forward's outputs `whole`; None if no form is accepted."""
    t, wrong = request.x.shape[1], None
    noise = get_tolerance(request) * float(whole.abs().max())
    several = (t // 3, t - t // 3 - 1, 1)  # a prompt, the next tokens at once, and the last one
    forms = (make_kept_cache_step,) if request.name in KEPT_ARGUMENTS else FORMS
    for form, placed in itertools.product(forms, (False, True)):
        output = run_steps(request, form, (1,) * t, placed)
        if output is None:
            continue
        steps: tuple[int, ...] = (1,) * t
        evidence = describe_difference(output, whole, noise, SINGLE, format_token)
        output = run_steps(request, form, several, placed) if evidence is None and several[1] > 1 and several[0] else None
        if output is not None:
            steps, evidence = several, describe_difference(output, whole, noise, SEVERAL, format_token)
        if evidence is None:
            what = WHAT if output is not None else f"{WHAT}, {SINGLE}"  # refusing several tokens is allowed
            return Checked(what, f"a difference of {noise:.0e} would be detected")
        if wrong is None:
            cause = explain_steps(request, form, steps, placed, format_token)
            wrong = Finding("wrong cache", f"{evidence}{cause and f': token {cause}'}", CURE, cause="cache")
    return wrong


def explain_steps(
    request: CacheRequest, form: Form, steps: Sequence[int], placed: bool, format_token: Callable[[int], str]
) -> str:
    """Return what differs first in the attention calls of steps with a cache, "" if that is not known."""
    return decoding_causes.explain_difference(
        request.module,
        partial(run_steps, request, make_plain_step, (request.x.shape[1],)),
        partial(run_steps, request, form, steps, placed),
        steps,
        format_token,
    )


def has_same_output(request: CacheRequest, full: Tensor) -> bool:
    """Return whether the module alone gives the subject's output `full`.

    They differ if the arguments of a partial, or another function around the module, change the output.
    """
    output = run_steps(request, make_plain_step, (request.x.shape[1],))
    if output is None or output.shape != full.shape:
        return False
    return float((output - full).abs().max()) <= get_tolerance(request) * float(full.abs().max())


def get_tolerance(request: CacheRequest) -> float:
    """Return the difference, relative to the largest output, that may be rounding.

    A quantized model of float32 may cache keys and values in bfloat16.
    """
    dtype = next((one.dtype for one in request.module.parameters() if one.is_floating_point()), torch.float32)
    if dtype == torch.float32 and any(isinstance(one, QuantizedLinear) for one in request.module.modules()):
        dtype = torch.bfloat16
    return max(SLACK * dependency.estimate_rounding(dtype), LEAST)


def describe_difference(
    output: Tensor, whole: Tensor, noise: float, how: str, format_token: Callable[[int], str]
) -> str | None:
    """Describe the first output that differs by more than `noise`; None if there is none."""
    change = (output - whole).double().abs().amax((0, 2))
    wrong = ~(change <= noise)
    if not wrong.any():
        return None
    i = int(wrong.int().argmax())
    return f"decoding {how} with its cache, output {format_token(i)} differs from the full forward by {change[i]:.2g}"


def cast_to_double(request: CacheRequest) -> CacheRequest | None:
    """Return the same request in float64; None if the module is large or cannot be copied."""
    if sum(one.numel() for one in request.module.parameters()) > COPIED:
        return None
    module = copy_module_as_double(request.module)
    return (
        None
        if module is None
        else request._replace(module=module, x=request.x.double() if request.x.is_floating_point() else request.x)
    )


def run_steps(request: CacheRequest, form: Form, steps: Sequence[int], placed: bool = False) -> Tensor | None:
    """Return the outputs of x, concatenated over steps of these numbers of tokens; None if the module rejects this form.

    With `placed`, each argument of the module that is in WHERE gets the positions of the new tokens; None if it has no such
    argument.
    """
    where = [name for name in POSITION_ARGUMENTS if name in request.parameter_names]
    if placed and not where:
        return None
    snapshot, outputs, before = take_snapshot(request.module), [], 0
    try:
        with torch.no_grad():
            step = form(request)
            for part in request.x.split(list(steps), 1):
                given = {name: make_position_argument(name, before, part) for name in where} if placed else {}
                outputs.append(step(part.clone(), given))
                before += part.shape[1]
        output = torch.cat(outputs, 1)
    except Exception:  # the module takes another form of cache
        return None
    finally:
        snapshot.restore()
    return output if output.shape[:2] == request.x.shape[:2] else None


def make_position_argument(name: str, before: int, part: Tensor) -> Any:
    """Return the positions of the next tokens as an argument of this name expects them."""
    places = torch.arange(before, before + part.shape[1], device=part.device)
    return before if name in OFFSET_ARGUMENTS else places[None] if name.startswith("position") else places


def make_plain_step(request: CacheRequest) -> Step:
    """Make the step without a cache: the full forward."""
    return lambda part, given: request.read(request.module(part), part)


def make_kept_cache_step(request: CacheRequest) -> Step:
    """Make the step of a module that keeps its cache itself, and takes the positions of the new tokens or use_cache."""
    asked = make_cache_arguments(request)

    def run_step(part: Tensor, given: dict[str, Any]) -> Tensor:
        if not given and not asked:
            raise TypeError("it is not asked to continue")
        return request.read(request.module(part, **given, **asked), part)

    return run_step


def make_regard_step(request: CacheRequest) -> Step:
    """Make the step with a regard Cache.

    A model takes the whole cache. A layer takes `past`, a function that puts the cached keys and values before the new ones.
    """
    cache, layer = Cache(sum(1 for _ in request.module.modules()), TOKENS), request.x.dim() > 2
    calls = 0

    def extend_layer(k: Tensor, v: Tensor) -> Any:
        nonlocal calls
        calls += 1
        return cache.layer(0)(k, v)

    def run_step(part: Tensor, given: dict[str, Any]) -> Tensor:
        before, called = cache.longest, calls
        if layer:
            cache.extend(torch.zeros(part.shape[:2], dtype=torch.long))
        returned = request.module(part, **{request.name: extend_layer if layer else cache}, **given)
        if cache.longest != before + part.shape[1] or (layer and calls == called):
            raise TypeError("it did not use the cache")
        return request.read(returned, part)

    return run_step


def make_returned_cache_step(request: CacheRequest) -> Step:
    """Make the step with a cache that the module returns and takes again.

    A model of ids whose cache has a state of one size, as a recurrence has, is given several tokens at first only: many such
    models begin anew with them.
    """
    past, count = None, 0

    def run_step(part: Tensor, given: dict[str, Any]) -> Tensor:
        nonlocal past, count
        is_checked = past is not None and part.shape[1] > 1 and request.x.dim() == 2
        before = {name: one.clone() for name, one in iterate_cached(past)} if is_checked else {}
        count += part.shape[1]
        returned = request.module(part, **{request.name: past}, **given, **make_cache_arguments(request))
        past = find_returned_cache(returned, request.name, count)
        if is_checked and has_state(before, dict(iterate_cached(past))):
            raise TypeError("it keeps a state that may take one token at a time")
        return request.read(returned, part)

    return run_step


def make_hugging_face_step(request: CacheRequest) -> Step:
    """Make the step of a Hugging Face layer with a DynamicCache, one token at a time.

    Several tokens would need a mask, which the layer's model makes.
    """
    cache = sys.modules["transformers"].DynamicCache()
    layer = next((part.layer_idx for part in request.module.modules() if isinstance(getattr(part, "layer_idx", None), int)), 0)
    before = 0

    def run_step(part: Tensor, given: dict[str, Any]) -> Tensor:
        nonlocal before
        if part.shape[1] > 1 or request.x.dim() == 2:
            raise TypeError("it is given no mask")
        before += 1
        returned = request.module(part, **{request.name: cache}, **given, **make_cache_arguments(request))
        if cache.get_seq_length(layer) != before:
            raise TypeError("it did not fill the cache")
        return request.read(returned, part)

    return run_step


FORMS: tuple[Form, ...] = (make_regard_step, make_returned_cache_step, make_hugging_face_step)


def make_cache_arguments(request: CacheRequest) -> dict[str, bool]:
    """Return the arguments that make a module return its cache."""
    return {"use_cache": True} if "use_cache" in request.parameter_names else {}


def find_returned_cache(returned: Any, name: str, count: int) -> Any:
    """Return the cache in a module's output: the entry `name`, or the first part that may hold it.

    A tensor of as many tokens as were passed so far, (b, count, c) or (b, h, count, c), is one of latent keys and values.

    Raises TypeError if there is none.
    """
    if isinstance(returned, Mapping) and returned.get(name) is not None:
        return returned[name]
    rest = list_parts(returned)[1:]
    found = [one for one in rest if not isinstance(one, Tensor) and can_hold_tensor(one)]
    found += [one for one in rest if isinstance(one, Tensor) and one.dim() in (3, 4) and one.shape[-2] == count]
    if not found:
        raise TypeError("it returns no cache")
    return found[0]


def can_hold_tensor(one: Any) -> bool:
    """Return whether a value may hold a tensor: a container with one in it, or an object with attributes."""
    if isinstance(one, (list, tuple, dict)):
        return any(
            isinstance(each, Tensor) or can_hold_tensor(each) for each in (one.values() if isinstance(one, dict) else one)
        )
    return hasattr(one, "__dict__")


def iterate_cached(cache: Any, name: str = "", depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Yield the floating tensors of more than one axis in a cache, with their places in it."""
    if isinstance(cache, Tensor):
        if cache.is_floating_point() and cache.dim() > 1:
            yield name, cache
    elif depth < DEEPEST and can_hold_tensor(cache):
        parts = (
            cache if isinstance(cache, dict) else dict(enumerate(cache)) if isinstance(cache, (list, tuple)) else vars(cache)
        )
        for key, one in parts.items():
            yield from iterate_cached(one, f"{name}.{key}", depth + 1)


def has_state(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> bool:
    """Return whether a tensor of a cache changes without growing, as the state of a recurrence does."""
    return any(
        name in after and after[name].shape == one.shape and not torch.equal(after[name], one) for name, one in before.items()
    )
