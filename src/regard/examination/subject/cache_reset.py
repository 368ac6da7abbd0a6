"""Find how a module's cache is emptied: a method, an argument or an attribute after which a call is like a first one.

Each way is tried on a copy. Names decide nothing: a method is tried if its code mentions what a call changed.
"""

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn

from regard.examination.subject.restore_state import get_attributes, is_of_library
from regard.examination.subject.snapshot import MODULE_ATTRIBUTES

MOST_ARGUMENTS = 2  # that a method needs: the number of sequences, and of tokens
Holder = Any  # a module, or another object that a module holds


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
