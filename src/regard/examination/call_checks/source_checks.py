"""Check that queries, keys and values come from the arguments that are meant for them, by replacing one argument at a time."""

import contextlib
import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.examination.call_reading.inner_calls import InnerCall, record_inner_calls
from regard.examination.report import Checked, Finding, Unknown
from regard.examination.subject import inputs
from regard.examination.subject.adapters import get_dtype_and_device
from regard.examination.subject.attention_output import list_parts
from regard.examination.subject.call_conventions import get_signature_owner, list_required_arguments, parse_qkv, parse_roles
from regard.examination.subject.zero_weights import find_zero_weights

SOURCE = re.compile(
    r"context|memory|cross|encoder|source|src|cond|kv|other|image|text|^y$|^z$|^xa$|(?:^|_)(?:ctx|mem|enc)(?:_|$)"
)
ASIDE = re.compile(r"mask|cache|past|bias|pos|weight|len|cos|sin|rot|freq")
TOKENS, MOST_WIDTHS = 6, 4  # of sequences that are guessed
WHAT = "keys and values come from the argument that is meant for them"
NAMES = "arguments whose names state their roles, as forward(x, context)"
CURE = "Project keys and values from it: k = to_k({0}), v = to_v({0}), and queries from the other sequence."


class Moves(NamedTuple):
    """Which of the queries, keys and values of a call, and whether the output, move with an argument."""

    calls: list[tuple[str, str]]  # of each call: its module, and the letters of q, k and v that move
    output: bool

    @property
    def is_aside(self) -> bool:
        """Whether no query, key or value of any call moves."""
        return not any(letters for _, letters in self.calls)

    @property
    def is_unused(self) -> bool:
        """Whether nothing moves."""
        return self.is_aside and not self.output


def bind_inputs(subject: Any, sample: Any) -> dict[str, Any]:
    """Return a sample of positional or named arguments by the names of the arguments; empty if they have none."""
    if isinstance(sample, Mapping):
        return dict(sample)
    try:
        bound = inspect.signature(get_signature_owner(subject)).bind(*sample)
    except (TypeError, ValueError):
        return {}
    kinds = inspect.signature(get_signature_owner(subject)).parameters
    return (
        dict(bound.arguments)
        if all(kinds[name].kind is not inspect.Parameter.VAR_POSITIONAL for name in bound.arguments)
        else {}
    )


def guess_inputs(subject: Any, module: nn.Module | None) -> dict[str, Tensor]:
    """Return two sequences that a module such as forward(x, context) accepts; empty if it takes others, or none work."""
    needed = [name.removesuffix("=") for name in list_required_arguments(subject) or ()]
    if module is None or len(needed) != 2 or ASIDE.search(needed[1]) or not SOURCE.search(needed[1]):
        return {}
    widths = inputs.guess_widths(module)[:MOST_WIDTHS]
    for one, other in sorted(itertools.product(widths, widths), key=lambda pair: pair[0] != pair[1]):
        draw = torch.Generator().manual_seed(31)
        sizes = (2, TOKENS, one), (2, TOKENS + 1, other)
        dtype, device = get_dtype_and_device(module)
        made = [torch.randn(size, generator=draw, dtype=torch.float64).to(device, dtype) for size in sizes]
        given = dict(zip(needed, made, strict=True))
        with contextlib.suppress(Exception), torch.no_grad():  # a user's layer may raise anything
            subject(**given)
            return given
    return {}


def check_sources(
    module: nn.Module, call: Callable[..., object], given: Mapping[str, Any]
) -> Iterator[Finding | Checked | Unknown]:
    """Yield whether each attention call reads keys and values from the argument whose name says so: context, or key and value.

    Of two sequences of other names, one that nothing depends on is found, and one that has part of a role is not known.
    `call` takes the arguments by name. Nothing is yielded for a module with one sequence, or if nothing was recorded.
    """
    sequences = [name for name, one in given.items() if is_sequence(one) and not ASIDE.search(name)]
    trio = parse_roles(sequences[:3]) is not None if len(sequences) >= 3 else False
    named = sequences[:3] if trio else [name for name in sequences[1:] if SOURCE.search(name)]
    if not named and len(sequences) != 2:
        return
    others = named or [next((name for name in sequences if SOURCE.search(name)), sequences[1])]
    before = run_calls(module, call, given)
    if before is None or not before[0]:
        return
    for name in others if trio else [*others, *(name for name in sequences if name not in others)]:
        moves = measure_moves(module, call, given, name, before)
        if moves is None or (moves.is_unused and find_zero_weights(module)):  # zeros may hide what it does
            return
        wrong = find_wrong_role(moves, name) if trio else find_wrong_source(moves, name, name in others)
        if wrong is not None and (trio or moves.is_unused or (named and not moves.is_aside)):
            yield Finding("wrong roles", wrong[1], CURE.format("key" if trio else others[0]), 2.0, "source", wrong[0])
            return
        if wrong is not None:
            yield Unknown(f"whether {name} is used in its role: {wrong[1]}", NAMES)
            return
    yield Checked(WHAT, f"{' and '.join(others)} replaced, one at a time")


def is_sequence(one: object) -> bool:
    """Return whether an argument is a sequence of vectors, (b, t, c)."""
    return isinstance(one, Tensor) and one.is_floating_point() and one.dim() == 3


def run_calls(
    module: nn.Module, call: Callable[..., object], given: Mapping[str, Any]
) -> tuple[list[InnerCall], Tensor | None] | None:
    """Return the recorded calls and the first tensor of the output; None if the module raises."""
    kept: list[object] = []
    try:
        with torch.no_grad():
            calls = record_inner_calls(module, lambda: kept.append(call(**given))).calls
    except Exception:  # whatever a user's layer raises: another check reports it
        return None
    output = next((one for one in list_parts(kept[0]) if isinstance(one, Tensor)), None)
    return calls, output


def measure_moves(
    module: nn.Module,
    call: Callable[..., object],
    given: Mapping[str, Any],
    name: str,
    before: tuple[list[InnerCall], Tensor | None],
) -> Moves | None:
    """Return what moves when one argument is replaced by other numbers; None if the module raises."""
    changed = given[name].flip(-1) * 0.7 + 0.3
    after = run_calls(module, call, {**given, name: changed})
    if after is None or len(after[0]) != len(before[0]):
        return None
    calls = [(one.name, list_moved(one, other)) for one, other in zip(before[0], after[0], strict=True)]
    output = before[1] is None or after[1] is None or not torch.allclose(before[1], after[1], atol=1e-6)
    return Moves(calls, output)


def list_moved(one: InnerCall, other: InnerCall) -> str:
    """Return the letters of the tensors of a call that differ from those of another, such as "kv"."""
    pairs = {letter: (getattr(one.call, letter), getattr(other.call, letter)) for letter in "qkv"}
    pairs = {
        letter: pair if pair[0] is not None else pairs["k"] for letter, pair in pairs.items()
    }  # values are not always known
    return "".join(letter for letter, (x, y) in pairs.items() if differs(x, y))


def differs(x: Tensor, y: Tensor | None) -> bool:
    """Return whether two tensors differ beyond rounding."""
    return y is None or x.shape != y.shape or bool((x - y).abs().max() > 1e-5 * x.abs().max())


def find_wrong_source(moves: Moves, name: str, is_source: bool) -> tuple[str, str] | None:
    """Return the module that does not read keys and values from another sequence, and the evidence; None if each does.

    Of a sequence that is no source, only that nothing depends on it is returned.
    """
    if moves.is_unused or (is_source and moves.is_aside):
        where = moves.calls[-1][0]
        does = f"no query, key or value of {where or 'the layer'} depends on {name}"
        does += ": it attends to its own sequence" if is_source else ""
        return where, does + ("" if moves.output else ", and so no output depends on it")
    for where, letters in moves.calls if is_source else ():
        if letters == "q":
            return where, f"in {where or 'the layer'} queries depend on {name}, but keys and values do not: they are exchanged"
        if letters in ("k", "v", "qk", "qv"):
            has, lacks = ("values", "keys") if "v" in letters else ("keys", "values")
            return where, f"in {where or 'the layer'} {has} depend on {name}, but {lacks} do not"
        if letters:
            return None  # later calls may depend on it through the output of this one
    return None


def find_wrong_role(moves: Moves, name: str) -> tuple[str, str] | None:
    """Return the module in which query, key or value is not used as it is named, and the evidence; None if each is."""
    role, (where, letters) = parse_qkv(name), moves.calls[0]
    if letters == role or (role == "k" and letters in ("k", "kv")) or (not letters and moves.output):
        return None  # values are not always known
    words = {"q": "queries", "k": "keys", "v": "values"}
    made = " and ".join(words[letter] for letter in letters) or "nothing"
    sentence = f"{made} depend{'s' * (not letters)} on the argument {name}, which is meant for {words[role]}"
    return where, f"in {where or 'the layer'} {sentence}"


def list_sequences(names: Sequence[str], x: Tensor) -> dict[str, Tensor]:
    """Return different sequences of the shape of x for arguments of these names."""
    return {name: x.roll(n, 1) * (1 + 0.1 * n) for n, name in enumerate(names)}
