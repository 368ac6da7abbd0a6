"""Checks of what a caller passes: the value, or one sentence that says what was expected and what came."""

import operator
import os
from collections.abc import Sequence
from contextlib import suppress
from numbers import Real
from typing import Any, TypeVar

import torch
from torch import Tensor

from regard.errors import ConfigError, MissingNameError, OutOfRangeError, ShapeError

FLOATS = frozenset((torch.float32, torch.bfloat16, torch.float16, torch.float64))  # dtypes that attention is computed in
FARTHEST = 2**61  # of a position among the keys, and of a bound on a number of keys: sums of a few stay within int64
LONGEST_NAME = 255  # bytes of a file's name, on the file systems in use
SHOWN = 60  # characters of a value in a sentence
Value = TypeVar("Value")


def describe(value: object) -> str:
    """A value in a few words, for a sentence: what it is, and for a tensor its dtype and shape."""
    if isinstance(value, Tensor):
        kind = "a nested" if value.is_nested else "a" if value.layout is torch.strided else f"a {value.layout}"
        return f"{kind} tensor of {value.dtype}" + ("" if value.is_nested else f" {tuple(value.shape)}")
    if isinstance(value, int) and value.bit_length() > 64:
        return f"a whole number of {value.bit_length()} bits"
    if value is None or isinstance(value, (int, float, complex)):
        return repr(value)
    if isinstance(value, (str, bytes)):
        return repr(value) if len(value) <= SHOWN else f"{value[:SHOWN]!r} and {len(value) - SHOWN:,} more characters"
    return f"the class {value.__name__}" if isinstance(value, type) else with_article(type(value).__name__)


def with_article(noun: str) -> str:
    """A noun, or the name of a class, after a or an."""
    return f"{'an' if noun[:1] in 'AEIOUaeio' else 'a'} {noun}"


def check_instance(name: str, value: object, kind: type[Value], advice: str = "") -> Value:
    """The value, or ConfigError where it is of another kind; advice is a sentence more."""
    if not isinstance(value, kind):
        raise ConfigError(f"{name} must be {with_article(kind.__name__)}, got {describe(value)}.{advice and f' {advice}'}")
    return value


def check_number(name: str, value: Any, alternative: str = "") -> float:
    """A real number as a float, or ConfigError."""
    if type(value) is float:  # at once: this stands before every call of attention
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float, Real, torch.SymInt, torch.SymFloat)):
        raise ConfigError(f"{name} must be a number{alternative}, got {describe(value)}.")
    try:
        return float(value)
    except OverflowError:
        raise ConfigError(f"{name} must be a number that a float can hold{alternative}, got {describe(value)}.") from None


def check_whole(name: str, value: Any, alternative: str = "") -> int:
    """A whole number, or ConfigError; a bool is none. Alternative is what else is taken."""
    if type(value) is int:
        return value
    if not isinstance(value, bool) and getattr(value, "dtype", None) is not torch.bool:
        with suppress(TypeError, RuntimeError):  # of tensors and arrays that are no one number
            return operator.index(value)
    raise ConfigError(f"{name} must be a whole number{alternative}, got {describe(value)}.")


def check_count(name: str, value: Any, least: int = 1, most: int = FARTHEST, alternative: str = "") -> int:
    """A whole number from least to most, or ConfigError."""
    found = value if type(value) is int else check_whole(name, value, f" of at least {least}{alternative}")
    if not least <= found <= most:
        limit = f" and at most {'2**61' if most == FARTHEST else f'{most:,}'}" if found > most else ""
        raise ConfigError(f"{name} must be a whole number of at least {least}{limit}{alternative}, got {describe(found)}.")
    return found


def check_place(name: str, value: Any, size: int, of: str) -> int:
    """An index below size, counted from the end where it is negative; OutOfRangeError where there is none."""
    found = check_whole(name, value)
    if not -size <= found < size:
        there = f"0 to {size - 1}" if size else "none"
        raise OutOfRangeError(f"{name} {describe(found)} is out of range: {of} has {there}.")
    return found % size


def check_sequence(name: str, value: Any) -> Sequence[Any]:
    """A list, a tuple or another sequence, or ConfigError; text is none."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise ConfigError(f"{name} must be a list or a tuple, got {describe(value)}.")
    return value


def check_path(name: str, value: Any) -> Any:
    """The path of a file or folder, or ConfigError."""
    if not isinstance(value, (str, os.PathLike)):
        raise ConfigError(f"{name} must be a path, as text or a pathlib.Path; got {describe(value)}.")
    try:
        place = os.fsencode(value)
    except UnicodeEncodeError:
        place = b"\0"
    longest = max(map(len, place.replace(os.sep.encode(), b"/").split(b"/")))
    if b"\0" in place or longest > LONGEST_NAME:
        why = f"a name has at most {LONGEST_NAME} bytes" if longest > LONGEST_NAME else "no file can have this name"
        raise ConfigError(f"{name} must be the path of a file or folder, and {why}; got {describe(value)}.")
    return value


def check_choice(name: str, value: Any, choices: Sequence[str]) -> Any:
    """One of some words, or MissingNameError."""
    if not isinstance(value, str):
        raise ConfigError(f"{name} must be one of {', '.join(map(repr, choices))}; got {describe(value)}.")
    if value not in choices:
        raise MissingNameError(f"{name} must be one of {', '.join(map(repr, choices))}; got {describe(value)}.")
    return value


def check_floating(name: str, x: object, advice: str = "") -> Tensor:
    """A dense tensor of a dtype that attention is computed in, or ConfigError; advice is a sentence more."""
    if not isinstance(x, Tensor):
        raise ConfigError(f"{name} must be a tensor, got {describe(x)}.")
    if x.dtype not in FLOATS or x.layout is not torch.strided or x.is_nested:
        hint = f" {advice}" if advice else ""
        raise ConfigError(f"{name} must be a dense tensor of float16, bfloat16, float32 or float64; got {describe(x)}.{hint}")
    return x


def check_axes(name: str, x: object, least: int, form: str = "") -> Tensor:
    """A floating tensor of at least so many axes, or ConfigError or ShapeError; form is what its axes are."""
    found = check_floating(name, x)
    if found.dim() < least:
        raise ShapeError(f"{name} must have {form or f'{least} axes or more'}, got {tuple(found.shape)}.")
    return found
