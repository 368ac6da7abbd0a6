"""The names of the parts of a model, of its modules in messages, of calls of one module, and of the module behind a call."""

import re
from functools import lru_cache

DECODERS = ("decoder", "language_model", "text_decoder")  # the default among several parts of a model
CALL = ", call "  # in the name of a layer that is one of several calls of a module, see repeated_calls.py


@lru_cache
def list_part_names(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the parts of a model with modules of attention at these paths; empty if it has one part only."""
    paths = [re.sub(r"\d+", "*", find_module_path(name)).split(".") for name in names]
    for components in zip(*paths, strict=False):
        if len(set(components)) > 1:
            lengths = {len(path) for path in paths}
            last = len(lengths) == 1 and components == tuple(path[-1] for path in paths)
            return () if last else tuple(dict.fromkeys(components))
    return ()


def find_default_part(parts: list[str]) -> str | None:
    """Return the part whose layers are numbered where none is named: the decoder; None for all."""
    return next((one for one in parts if one in DECODERS), None)


def is_in_part(name: str, part: str) -> bool:
    """Return whether a module's path has a part as a component, or as the beginning of one before an underscore."""
    return any(component == part or component.startswith(f"{part}_") for component in find_module_path(name).split("."))


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
