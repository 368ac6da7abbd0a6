"""Detect the state that a module keeps from call to call, and reset it so that all calls are alike."""

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.examination import dependency
from regard.examination.report import Checked, Finding, Unknown
from regard.examination.subject.adapters import SubjectAdapter
from regard.examination.subject.attention_output import AttentionOutput
from regard.examination.subject.call_conventions import AttentionFunction
from regard.examination.subject.inputs import InputShapes
from regard.examination.subject.restore_state import (
    MODULE_ATTRIBUTES,
    get_attributes,
    is_of_library,
    seed_generators,
    take_snapshot,
)

Said = list[Finding | Checked | Unknown]
CLOSE = 1e3  # times rounding: calls of parts sum in another order
FORGET = "Keep no state in the module that changes the output of its next call, or reset it for each sequence."
PARTS = "two calls on parts of a sequence give the outputs of one call on all of it; it was reset before all other calls"
EMPTY = (
    "Keep keys and values of earlier calls only where that is asked for, as by an argument past or use_cache, and let a method "
    "empty them before the next sequence."
)
CACHE = "the state that it keeps from call to call is a cache"
MOST_ARGUMENTS = 2  # that a method needs: the number of sequences, and of tokens
Holder = Any  # a module, or another object that a module holds


def detect_state(subject: SubjectAdapter, shapes: InputShapes) -> tuple[SubjectAdapter, Said]:
    """Return a subject that is reset before each call if it keeps state, and the results about that state."""
    inputs, others = (shapes.make(None, shapes.batch, seed, 1.0, subject.dtype, subject.device) for seed in (0, 1))
    snapshot = None if subject.module is None else take_snapshot(subject.module)
    try:
        first = compute_fixed_context(subject, inputs)
        again = compute_fixed_context(subject, inputs)
        names = [] if snapshot is None else snapshot.list_changes()
        if snapshot is None or not names:
            return subject, []
        change, stale = dependency.measure_difference(first, again), compute_fixed_context(subject, others)
        snapshot.restore()
        fresh = compute_fixed_context(subject, others)
        snapshot.restore()
        if change == 0 and dependency.measure_difference(fresh, stale) == 0:
            return subject, []
        if dependency.measure_difference(first, compute_fixed_context(subject, inputs)) > 0:  # it is random
            return subject, []
        snapshot.restore()
        if change == 0:
            results: Said = [report_stale_state(names, dependency.measure_difference(fresh, stale))]
        else:
            results = [check_state_as_cache(subject, inputs, (first, again), names)]
    except Exception:  # the probes report what it raises
        return subject, []
    finally:
        if snapshot is not None:
            snapshot.restore()
    return reset_before_calls(subject, subject.module), results


def compute_fixed_context(subject: SubjectAdapter, inputs: tuple[Tensor, ...]) -> Tensor:
    """Return the context of a call with fixed random numbers."""
    seed_generators(1, subject.device)
    with torch.no_grad():
        return subject.call(*inputs).context


def describe_state(names: Sequence[str]) -> str:
    """Describe what a call changes."""
    return f"it keeps state from call to call ({', '.join(names[:3])})"


def report_stale_state(names: Sequence[str], change: float) -> Finding:
    """Return the finding of state that equal inputs hide: what is kept of one sequence is used for the next one."""
    sentence = f"{describe_state(names)}: outputs differ by {change:.2g} after a call with another input"
    return Finding("wrong cache", sentence, FORGET, 3.0, "state")


def check_state_as_cache(
    subject: SubjectAdapter, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, Tensor], names: Sequence[str]
) -> Finding | Checked:
    """Check whether state is a cache that can be emptied.

    The parts of a sequence, one after the other, give what the whole sequence gives, and some way of emptying it is found.
    `outputs` are those of two calls with the same input, and `names` what they changed.
    """
    sentence, output = describe_state(names), outputs[0]
    if is_cache(subject, inputs, output):
        assert subject.module is not None

        def is_first_after(module: nn.Module, way: Reset) -> bool:
            assert subject.again is not None
            copied = replace(subject, call=subject.again(module), module=module)
            compute_fixed_context(copied, inputs)
            way.apply(module)
            return dependency.measure_difference(output, compute_fixed_context(copied, inputs)) == 0

        way = find_reset(subject.module, names, inputs[0].shape, is_first_after)
        if way is not None:
            return Checked(CACHE, f"{sentence}: {PARTS}; it is emptied by {way}")
        sentence += ": a second sequence sees the first one, and no method or argument empties the cache"
        return Finding("wrong cache", sentence, EMPTY, 3.0, "state")
    sentence += (
        f": two calls with the same input differ by {dependency.measure_difference(*outputs):.2g}, and a sequence in parts "
        "does not give the outputs of the whole"
    )
    return Finding("wrong cache", sentence, FORGET, 3.0, "state")


def is_cache(subject: SubjectAdapter, inputs: tuple[Tensor, ...], output: Tensor) -> bool:
    """Return whether the parts of a sequence, one after the other, give the output of the whole; the state is restored."""
    n = inputs[0].shape[-2] // 2
    if subject.form != "x" or not n or subject.module is None:
        return False
    snapshot = take_snapshot(subject.module)
    try:
        parts = [compute_fixed_context(subject, (x,)) for x in (inputs[0][:, :n], inputs[0][:, n:])]
    except Exception:  # a cache would take the rest of a sequence
        return False
    finally:
        snapshot.restore()
    return dependency.measure_difference(output, torch.cat(parts, 1), times=CLOSE) == 0


def reset_before_calls(subject: SubjectAdapter, module: nn.Module | None) -> SubjectAdapter:
    """Return a subject that is reset to its present state before each call; so is each copy of its module."""
    assert module is not None

    def make_wrapper(part: nn.Module) -> Callable[[AttentionFunction], AttentionFunction]:
        snapshot = take_snapshot(part)

        def wrap_call(call: AttentionFunction) -> AttentionFunction:
            def call_reset(*inputs: Tensor) -> AttentionOutput:
                snapshot.restore()
                try:
                    return call(*inputs)
                finally:
                    snapshot.restore(numbers=not torch.is_grad_enabled())  # a backward pass may need them

            return call_reset

        return wrap_call

    again = subject.again
    wrapped = wrap_calls(subject, make_wrapper(module))
    return wrapped if again is None else replace(wrapped, again=lambda copy: make_wrapper(copy)(again(copy)))


def wrap_calls(subject: SubjectAdapter, wrap: Callable[[AttentionFunction], AttentionFunction]) -> SubjectAdapter:
    """Return a subject with each of its calls wrapped."""
    again, compiled = subject.again, subject.compiled
    return replace(
        subject,
        call=wrap(subject.call),
        again=None if again is None else lambda module: wrap(again(module)),
        compiled=None if compiled is None else wrap(compiled),
    )


class Reset(NamedTuple):
    """A way of emptying a cache, in words, and what does it to a module."""

    words: str
    apply: Callable[[nn.Module], None]


def find_reset(
    module: nn.Module, names: Sequence[str], shape: Sequence[int], is_first_after: Callable[[nn.Module, Reset], bool]
) -> str | None:
    """Return the first way after which a copy's next call is like its first one, in words; None without one.

    `names` are the attributes that a call changes, and `shape` starts with the numbers of sequences and of tokens.
    """
    for way in (*list_methods(module, names, shape), *list_arguments(module), *list_switches(module)):
        try:
            if is_first_after(copy.deepcopy(module), way):
                return way.words
        except Exception:  # no way of emptying it, or what it holds cannot be copied
            continue
    return None


def list_holders(module: nn.Module) -> Iterator[Holder]:
    """Yield each part of a module, and each object of a user's class that one holds."""
    for part in module.modules():
        yield part
        yield from (one for one in vars(part).values() if get_attributes(one) is not None)


def list_methods(module: nn.Module, names: Sequence[str], shape: Sequence[int]) -> Iterator[Reset]:
    """Yield the methods that mention what a call changes and need no argument, or the numbers of sequences and of tokens."""
    changed = {word for name in names for word in name.split(".")}
    found: dict[str, int] = {}
    for holder in list_holders(module):
        used = changed if isinstance(holder, nn.Module) else changed | vars(holder).keys()
        for kind in type(holder).__mro__:
            for name, method in vars(kind).items() if not is_of_library(kind) else ():
                code = getattr(method, "__code__", None)
                if name.startswith("__") or name == "forward" or code is None:
                    continue
                needed = count_required(method) - 1  # without self
                if needed in range(MOST_ARGUMENTS + 1) and used & {*code.co_names, *code.co_consts}:
                    found.setdefault(name, needed)

    def make_reset(name: str, needed: int) -> Reset:
        def apply(copied: nn.Module) -> None:
            for holder in list(list_holders(copied)):
                if not is_of_library(type(holder)) and callable(method := getattr(holder, name, None)):
                    method(*shape[:needed])

        return Reset(f"{name}({', '.join(map(str, shape[:needed]))})", apply)

    return (make_reset(name, needed) for name, needed in found.items())


def count_required(method: Callable[..., Any]) -> int:
    """Return how many arguments a function needs; many if it needs some by their names."""
    required = [one for one in inspect.signature(method).parameters.values() if one.default is one.empty]
    if any(one.kind is one.KEYWORD_ONLY for one in required):
        return MOST_ARGUMENTS + 2
    return sum(one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD) for one in required)


def list_arguments(module: nn.Module) -> Iterator[Reset]:
    """Yield the arguments with a default of a module's forward, each with other values of its kind."""
    for name, one in inspect.signature(module.forward).parameters.items():
        values: tuple[Any, ...] = ()
        if isinstance(one.default, bool):
            values = (not one.default,)
        elif one.default is None or isinstance(one.default, int):
            values = (0, False, True)
        for value in values:
            yield Reset(f"{name}={value}", make_argument_setter(name, value))


def make_argument_setter(name: str, value: Any) -> Callable[[nn.Module], None]:
    """Make the function that gives each later call of a module an argument."""

    def apply(module: nn.Module) -> None:
        plain = module.forward
        module.forward = lambda *args, **kwargs: plain(*args, **{**kwargs, name: value})

    return apply


def list_switches(module: nn.Module) -> Iterator[Reset]:
    """Yield the attributes of a module's parts that are True or False, each turned."""
    held = {
        name: value
        for part in module.modules()
        for name, value in vars(part).items()
        if isinstance(value, bool) and name not in MODULE_ATTRIBUTES
    }
    for name, value in held.items():

        def apply(copied: nn.Module, name: str = name, value: bool = value) -> None:
            for part in copied.modules():
                if vars(part).get(name) is value:
                    setattr(part, name, not value)

        yield Reset(f"{name} = {not value}", apply)
