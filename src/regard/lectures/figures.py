"""The numbers that the lectures print, as `figures.json` holds them."""

import functools
import json
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor


@functools.cache
def figures() -> dict[str, Any]:
    """The whole file: `tolerance`, `inputs` by name, and `examples`."""
    loaded: dict[str, Any] = json.loads((files("regard.lectures") / "figures.json").read_text(encoding="utf-8"))
    return loaded


def figure(name: str) -> dict[str, Any]:
    """The example with this id."""
    return next(example for example in figures()["examples"] if example["id"] == name)


def sentence(name: str) -> tuple[list[str], Tensor]:
    """The words of an input and their vectors, (t, d)."""
    entry = figures()["inputs"][name]
    return list(entry["tokens"]), tensor(entry["x"])


def tensor(numbers: Any) -> Tensor:
    """Numbers as printed, in which "-inf" stands for itself, as a float32 tensor."""

    def read(entry: Any) -> Any:
        return [read(part) for part in entry] if isinstance(entry, list) else float(entry)

    return torch.tensor(read(numbers))
