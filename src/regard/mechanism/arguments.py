"""Checks of a caller's arguments: each returns the value, or raises an error that says what was expected and what came."""

import operator
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from numbers import Real
from typing import Any, TypeVar

import torch
from torch import Tensor

from regard.errors import ConfigError, MissingNameError, OutOfRangeError, ShapeError

FLOATS = frozenset((torch.float32, torch.bfloat16, torch.float16, torch.float64))  # dtypes that attention is computed in
LARGEST_POSITION = 2**61  # largest position or number of keys: a few of them add up to less than int64's limit
LONGEST_NAME = 255  # bytes of a file's name on common file systems
SHOWN_CHARACTERS = 60  # characters of a value in a message
SPOKEN_VOWEL = re.compile(r"ndarray|[AEIOaeio]|U(?!s|ni|ti)[a-z]|[FHLMNRSX](?![a-z])")  # at the start of a class's name
Value = TypeVar("Value")


def describe_value(value: object) -> str:
    """Describe a value in a few words for a message: its type or value, and for a tensor its dtype and shape."""
    if isinstance(value, Tensor):
        kind = "a nested" if value.is_nested else "a" if value.layout is torch.strided else f"a {value.layout}"
        return f"{kind} tensor of {value.dtype}" + ("" if value.is_nested else f" {tuple(value.shape)}")
    if isinstance(value, int) and value.bit_length() > 64:
        return f"a whole number of {value.bit_length()} bits"
    if value is None or isinstance(value, (int, float, complex)):
        return repr(value)
    if isinstance(value, (str, bytes)):
        return (
            repr(value)
            if len(value) <= SHOWN_CHARACTERS
            else f"{value[:SHOWN_CHARACTERS]!r} and {len(value) - SHOWN_CHARACTERS:,} more characters"
        )
    return f"the class {value.__name__}" if isinstance(value, type) else add_article(type(value).__name__)


def add_article(noun: str) -> str:
    """Return a noun, or the name of a class, after a or an, as it is spoken: an ndarray, an LSTM, a UserDict."""
    return f"{'an' if SPOKEN_VOWEL.match(noun) else 'a'} {noun}"


def check_instance(name: str, value: object, kind: type[Value], advice: str = "") -> Value:
    """Return the value, or raise ConfigError if it is not of this class; `advice` is a sentence added to the message."""
    if not isinstance(value, kind):
        raise ConfigError(f"{name} must be {add_article(kind.__name__)}, got {describe_value(value)}.{advice and f' {advice}'}")
    return value


def check_number(name: str, value: Any, alternative: str = "") -> float:
    """Return a real number as a float, or raise ConfigError."""
    if type(value) is float:  # fast path: this runs before every call of attention
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float, Real, torch.SymInt, torch.SymFloat)):
        raise ConfigError(f"{name} must be a number{alternative}, got {describe_value(value)}.")
    try:
        return float(value)
    except OverflowError:
        raise ConfigError(f"{name} must be a number that a float can hold{alternative}, got {describe_value(value)}.") from None


def check_integer(name: str, value: Any, alternative: str = "") -> int:
    """Return an integer, or raise ConfigError, for a bool too; `alternative` names what else is accepted."""
    if type(value) is int:
        return value
    if not isinstance(value, bool) and getattr(value, "dtype", None) is not torch.bool:
        with suppress(TypeError, RuntimeError):  # tensors and arrays that are not one number
            return operator.index(value)
    raise ConfigError(f"{name} must be a whole number{alternative}, got {describe_value(value)}.")


def check_count(name: str, value: Any, least: int = 1, most: int = LARGEST_POSITION, alternative: str = "") -> int:
    """Return an integer from least to most, or raise ConfigError."""
    found = value if type(value) is int else check_integer(name, value, f" of at least {least}{alternative}")
    if not least <= found <= most:
        limit = f" and at most {'2**61' if most == LARGEST_POSITION else f'{most:,}'}" if found > most else ""
        raise ConfigError(
            f"{name} must be a whole number of at least {least}{limit}{alternative}, got {describe_value(found)}."
        )
    return found


def check_index(name: str, value: Any, size: int, of: str) -> int:
    """Return an index from 0 to size - 1, counted from the end if negative, or raise OutOfRangeError."""
    found = check_integer(name, value)
    if not -size <= found < size:
        valid = f"0 to {size - 1}" if size else "none"
        raise OutOfRangeError(f"{name} {describe_value(found)} is out of range: {of} has {valid}.")
    return found % size


def check_flag(name: str, value: Any) -> bool:
    """Return True or False, or raise ConfigError for anything else."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be True or False, got {describe_value(value)}.")
    return value


def check_sequence(name: str, value: Any) -> Sequence[Any]:
    """Return a list, a tuple or another sequence, or raise ConfigError, for text too."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise ConfigError(f"{name} must be a list or a tuple, got {describe_value(value)}.")
    return value


def check_path(name: str, value: Any) -> Any:
    """Return the path of a file or folder, or raise ConfigError."""
    if not isinstance(value, (str, os.PathLike)):
        raise ConfigError(f"{name} must be a path, as text or a pathlib.Path; got {describe_value(value)}.")
    if value == "":
        raise ConfigError(f"{name} must be the path of a file or folder; got ''.")
    try:
        place = os.fsencode(value)
    except UnicodeEncodeError:
        place = b"\0"
    longest = max(map(len, place.replace(os.sep.encode(), b"/").split(b"/")))
    if b"\0" in place or longest > LONGEST_NAME:
        why = f"a name has at most {LONGEST_NAME} bytes" if longest > LONGEST_NAME else "no file can have this name"
        raise ConfigError(f"{name} must be the path of a file or folder, and {why}; got {describe_value(value)}.")
    return value


def check_choice(name: str, value: Any, choices: Sequence[str]) -> Any:
    """Return one of the choices; raise MissingNameError for another text, ConfigError for what is no text."""
    if not isinstance(value, str):
        raise ConfigError(f"{name} must be one of {', '.join(map(repr, choices))}; got {describe_value(value)}.")
    if value not in choices:
        raise MissingNameError(f"{name} must be one of {', '.join(map(repr, choices))}; got {describe_value(value)}.")
    return value


def check_floating(name: str, x: object, advice: str = "") -> Tensor:
    """Return a dense tensor of a dtype in FLOATS, or raise ConfigError; `advice` is a sentence added to the message."""
    if not isinstance(x, Tensor):
        raise ConfigError(f"{name} must be a tensor, got {describe_value(x)}.")
    if x.dtype not in FLOATS or x.layout is not torch.strided or x.is_nested:
        hint = f" {advice}" if advice else ""
        raise ConfigError(
            f"{name} must be a dense tensor of float16, bfloat16, float32 or float64; got {describe_value(x)}.{hint}"
        )
    return x


def check_tensor_axes(name: str, x: object, least: int) -> Tensor:
    """Return a floating tensor of at least `least` axes, or raise ConfigError or ShapeError."""
    found = check_floating(name, x)
    if found.dim() < least:
        raise ShapeError(f"{name} must have {least} axes or more, got {tuple(found.shape)}.")
    return found
