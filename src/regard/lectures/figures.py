"""The numbers that the lectures print, as `figures.json` holds them."""

import difflib
import functools
import json
from collections.abc import Iterable
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor

from regard.errors import ConfigError


@functools.cache
def figures() -> dict[str, Any]:
    """The whole file: `tolerance`, `inputs` by name, and `examples`."""
    loaded: dict[str, Any] = json.loads((files("regard.lectures") / "figures.json").read_text(encoding="utf-8"))
    return loaded


def figure(name: str) -> dict[str, Any]:
    """The example with this id. Raises ConfigError where there is none."""
    examples = {example["id"]: example for example in figures()["examples"]}
    found: dict[str, Any] = examples[known(name, examples)]
    return found


def known(name: str, names: Iterable[str]) -> str:
    """The name of an example, or ConfigError that lists the names there are."""
    names = list(names)
    if name in names:
        return name
    near = difflib.get_close_matches(name, names, n=1)
    meant = f" Did you mean {near[0]}?" if near else ""
    raise ConfigError(f"there is no example {name!r}.{meant} There are: {', '.join(names)}.")


def sentence(name: str, dtype: torch.dtype = torch.float32) -> tuple[list[str], Tensor]:
    """The words of an input and their vectors, (t, d)."""
    entry = figures()["inputs"][name]
    return list(entry["tokens"]), tensor(entry["x"], dtype)


def tensor(numbers: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers as printed, in which "-inf" stands for itself, as a tensor."""

    def read(entry: Any) -> Any:
        return [read(part) for part in entry] if isinstance(entry, list) else float(entry)

    return torch.tensor(read(numbers), dtype=dtype)
