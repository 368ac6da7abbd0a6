"""The numbers that the lectures print, from `figures.json`."""

import functools
import json
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor

from regard.lectures.example_steps import check_name


@functools.cache
def load_printed_numbers() -> dict[str, Any]:
    """Load the whole file: `tolerance`, `inputs` by name, and `examples`."""
    loaded: dict[str, Any] = json.loads((files("regard.lectures") / "figures.json").read_text(encoding="utf-8"))
    return loaded


def get_printed_example(name: str) -> dict[str, Any]:
    """Return the example with this id, or raise ConfigError."""
    examples = {example["id"]: example for example in load_printed_numbers()["examples"]}
    found: dict[str, Any] = examples[check_name(name, examples)]
    return found


def name_lectures(name: str) -> str:
    """Name the lectures that print a figure."""
    numbers = get_printed_example(name)["source"].replace(",", ", ")
    return f"lecture{'s' if ',' in numbers else ''} {numbers}"


def load_sentence(name: str, dtype: torch.dtype = torch.float32) -> tuple[list[str], Tensor]:
    """Return the words of an input and their vectors, (t, d)."""
    entry = load_printed_numbers()["inputs"][name]
    return list(entry["tokens"]), parse_tensor(entry["x"], dtype)


def parse_tensor(numbers: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    """Convert numbers as printed, with "-inf" for minus infinity, to a tensor."""

    def to_floats(entry: Any) -> Any:
        return [to_floats(part) for part in entry] if isinstance(entry, list) else float(entry)

    return torch.tensor(to_floats(numbers), dtype=dtype)
