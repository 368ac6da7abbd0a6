"""Computing what `regard walk` shows: the lectures' examples and those of the user's own words, files and settings."""

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.cli.walk_custom import make_custom_example
from regard.cli.walk_screen import OWN_OPTIONS, Screen, choose_view, find_word
from regard.errors import ConfigError
from regard.lectures.example_steps import Example, ExampleStep
from regard.lectures.examples import build_example
from regard.show.arithmetic import write_arithmetic
from regard.show.step_descriptions import describe_example
from regard.show.terminal import TableView


def compute_screen(options: argparse.Namespace) -> tuple[Screen, TableView]:
    """Return what is shown of the chosen example, and the part of it."""
    chosen, query, view = choose_part(options)
    part = view.get_range(len(chosen.keys), True)
    steps = describe_example(chosen) if query is None else write_arithmetic(chosen, query, part)
    return make_screen(chosen, steps, query), view


def make_screen(chosen: Example, steps: Sequence[ExampleStep], query: int | None = None) -> Screen:
    """Return what is shown of an example."""
    shared = {
        name: getattr(chosen, name) for name in ("name", "title", "source", "words", "sources", "focus", "notes", "leads_to")
    }
    return Screen(**shared, steps=tuple(steps), query=query, has_arithmetic=chosen.steps is not None)


def compute_json(options: argparse.Namespace) -> dict[str, Any]:
    """Return the numbers of the chosen example."""
    chosen, query, _ = choose_part(options)
    return convert_example(chosen, query)


def choose_part(options: argparse.Namespace) -> tuple[Example, int | None, TableView]:
    """Return the chosen example, the query to write out, and the part of a long sentence that is shown."""
    chosen = choose_example(options)
    query = None if options.query is None else find_word(options.query, chosen.words, chosen.name, "--query")
    width = 0 if chosen.v is None else chosen.v.shape[-1]
    view = choose_view(chosen.name, chosen.words, chosen.keys, width, options.start, options.rows, query)
    return move_focus_into_view(chosen, view), query, view


def choose_example(options: argparse.Namespace) -> Example:
    """Return the lectures' example, or the one made from the user's own words."""
    own = [name for name in OWN_OPTIONS if getattr(options, name) is not None]
    if options.model is not None:
        return make_model_example(options, own)
    if not own:
        return build_example(options.example or "simple")
    if options.example is not None:
        raise ConfigError(f"--example shows a sentence of the lectures unchanged: leave out --{own[0]}, or --example.")
    return make_custom_example(options)


def make_model_example(options: argparse.Namespace, own: Sequence[str]) -> Example:
    """Return the attention of a trained translator; only the words are the user's."""
    if options.example not in (None, "additive"):
        raise ConfigError(
            f"--model shows a translator's additive attention: use --example additive with it, got {options.example}."
        )
    other = next((name for name in own if name != "words"), None)
    if other is not None:
        raise ConfigError(f"--model has its own vectors and weights: leave out --{other}, or --model.")
    from regard.cli.walk_translation import (
        make_translation_example,
    )  # imports what the others do not need

    return make_translation_example(options.model, options.words)


def move_focus_into_view(chosen: Example, view: TableView) -> Example:
    """Return the example with a focus that is shown."""
    part = view.get_range(len(chosen.words), True)
    return chosen if not chosen.words or chosen.focus in part else dataclasses.replace(chosen, focus=part.stop - 1)


def convert_example(chosen: Example, query: int | None) -> dict[str, Any]:
    """Return the example as JSON values: every step by name, and those that are shown."""
    steps = {} if chosen.steps is None else {name: convert_tensor(step) for name, step in chosen.steps.items()}
    right = {} if chosen.right is None else {"right": {name: convert_tensor(step) for name, step in chosen.right.items()}}
    arithmetic = (
        {}
        if query is None
        else {"query": query, "arithmetic": [convert_step(step) for step in write_arithmetic(chosen, query)]}
    )
    return {
        "example": chosen.name,
        "title": chosen.title,
        "source": chosen.source,
        "words": chosen.words,
        **({"sources": chosen.sources} if chosen.sources else {}),
        "notes": chosen.notes,
        "scale": chosen.scale,
        **{name: convert_tensor(part) for name in (*"qkv", "weight") if (part := getattr(chosen, name)) is not None},
        "steps": steps,
        **right,
        "scenes": [convert_step(step) for step in describe_example(chosen)],
        **arithmetic,
    }


def convert_step(step: ExampleStep) -> dict[str, Any]:
    """Return a step that is shown as JSON values."""
    panels = [
        {name: getattr(one, name) for name in ("title", "rows", "columns", "axes")}
        | {"values": convert_tensor(torch.as_tensor(one.values))}
        for one in step.panels
    ]
    lines = [{"label": line.label, "calculation": line.calculation} for line in step.lines]
    return {"name": step.name, "formula": step.formula, "sentence": step.sentence, "panels": panels, "lines": lines}


def convert_tensor(values: Tensor) -> Any:
    """Return a tensor as lists, each number in the fewest digits that restore its float32, as a string if JSON has none."""
    if values.dim():
        return (
            [convert_tensor(part) for part in values]
            if values.dim() > 1
            else [convert_number(number) for number in values.numpy()]
        )
    return convert_number(values.numpy()[()])


def convert_number(number: Any) -> float | str:
    """Return one number as a JSON value."""
    return float(str(number)) if np.isfinite(number) else str(number)
