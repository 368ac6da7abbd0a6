"""The names of the parts of a model, of its modules in messages, of calls of one module, and of the module behind a call."""

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import takewhile

DECODERS = ("decoder", "language_model", "text_decoder")  # the default among several parts of a model
CALL = ", call "  # in the name of a layer that is one of several calls of a module, see repeated_calls.py


@lru_cache
def list_components(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the component of each of these paths where they first differ, apart from numbers; empty if they do not.

    Nor if they differ in their last component alone.
    """
    paths = [re.sub(r"\d+", "*", find_module_path(name)).split(".") for name in names]
    for place, components in enumerate(zip(*paths, strict=False)):
        if len(set(components)) > 1:
            return () if all(len(path) == place + 1 for path in paths) else components
    return ()


def list_part_names(names: Sequence[str]) -> list[str]:
    """Return the parts of a model with modules of attention at these paths; empty if it has one part only."""
    return list(dict.fromkeys(list_components(tuple(names))))


def find_default_part(parts: list[str]) -> str | None:
    """Return the part whose layers are numbered where none is named: the decoder; None for all."""
    return next((one for one in parts if one in DECODERS), None)


@lru_cache
def select_part(names: tuple[str, ...], part: str) -> frozenset[str]:
    """Return the paths that begin with a part, or have it, or it before an underscore, where the paths first differ.

    If none has, those of each part are searched in the same way, as of an encoder and a decoder beside a tower.
    """
    chosen = [name for name in names if is_inside(find_module_path(name), part)]
    groups = [] if chosen else [names]
    while groups and not chosen:
        pairs = [(component, name) for group in groups for component, name in zip(list_components(group), group, strict=False)]
        chosen = [name for component, name in pairs if f"{component}_".startswith(f"{part}_")]
        groups = [
            tuple(name for name, own in zip(group, list_components(group), strict=False) if own == component)
            for group in groups
            for component in list_part_names(group)
        ]
    return frozenset(chosen)


def is_in_part(name: str, part: str, names: Iterable[str]) -> bool:
    """Return whether a module's path is in a part of a model with modules of attention at these paths."""
    return name in select_part(tuple(dict.fromkeys((*names, name))), part)


def is_inside(name: str, block: str) -> bool:
    """Return whether a module's path is that of a block or of a part of it."""
    return name == block or name.startswith(f"{block}.")


def find_common_path(names: Sequence[str]) -> str:
    """Return the path that all of these begin with."""
    components = zip(*(name.split(".") for name in names), strict=False)
    return ".".join(same[0] for same in takewhile(lambda same: len(set(same)) == 1, components))


def name_call(module: str, number: int) -> str:
    """Return the name of a layer that is one of several calls of a module in one forward, counted from 1."""
    return f"{module}{CALL}{number}"


def find_module_path(name: str) -> str:
    """Return the path of the module of a layer, which may be one of its calls."""
    return name.partition(CALL)[0]


def describe_module(path: str) -> str:
    """Return what a module is called in a message: its path in the model, or "the model", whose path is empty."""
    return path or "the model"


def join_names(names: list[str], most: int = 6) -> str:
    """Return names, also paths of modules, joined by commas; after the first `most`, the number of the others."""
    if not names:
        return "nothing"
    return ", ".join(map(describe_module, names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")


def count_calls(calls: int, modules: int) -> str:
    """Return numbers of calls and of their modules in words, such as "3 calls of 1 module"."""
    return f"{calls} call{'s' * (calls != 1)} of {modules} module{'s' * (modules != 1)}"
