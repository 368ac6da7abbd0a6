"""Run `regard walk`.

Exit code 2 if the words, files or settings cannot be used.
"""

import argparse
import dataclasses
import json
import shlex
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text
from torch import Tensor

from regard.cli.arguments.walk import ROWS, WHOLE
from regard.cli.walk_custom import make_custom_example
from regard.cli.walk_translation import make_translation_example
from regard.errors import ConfigError
from regard.lectures.example_steps import Example, ExampleStep, Line
from regard.lectures.examples import EXAMPLES, build_example, summarize_example
from regard.show.arithmetic import write_arithmetic
from regard.show.step_descriptions import describe_example
from regard.show.terminal import (
    TableView,
    escape_text,
    get_palette,
    open_console,
    print_calculations,
    print_step,
    print_wrapped,
)

LONG, FEW = 100, 6  # a vector of more than LONG numbers is shown by FEW of them
OWN = ("words", "vectors", "weights", "heads", "mask", "seed")


def run(options: argparse.Namespace) -> int:
    """Show the example, the list of examples, or the example's numbers."""
    if options.list:
        print_examples(open_console())
        return 0
    chosen = choose_example(options)
    query = None if options.query is None else find_word(options.query, chosen, "--query")
    view = choose_view(chosen, options.start, options.rows, query)
    chosen = move_focus_into_view(chosen, view)
    if options.json:
        print(json.dumps(convert_example(chosen, query), allow_nan=False))
        return 0
    shown = (
        describe_example(chosen) if query is None else write_arithmetic(chosen, query, view.get_range(len(chosen.keys), True))
    )
    print_screen(open_console(), chosen, shown, view, query)
    return 0


def choose_example(options: argparse.Namespace) -> Example:
    """Return the lectures' example, or the one made from the user's own words."""
    own = [name for name in OWN if getattr(options, name) is not None]
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
    return make_translation_example(options.model, options.words)


def find_word(text: str, chosen: Example, option: str) -> int:
    """Return the index of a word, given as it is written or as its number from 1."""
    words = chosen.words
    if not words:
        raise ConfigError(f"the example '{chosen.name}' has no sentence, so {option} cannot be used.")
    found = [index for index, word in enumerate(words) if word == text]
    if len(found) == 1:
        return found[0]
    if found:
        numbers = [index + 1 if str(index + 1) not in words else f"@{index + 1}" for index in found]
        choices = " or ".join(f"{option} {number}" for number in numbers[:6])
        raise ConfigError(f"{escape_text(text)!r} occurs {len(found)} times in the sentence: use {choices}.")
    number = text.removeprefix("@")
    if number.isascii() and number.isdigit() and len(number) < 10:
        if 1 <= int(number) <= len(words):
            return int(number) - 1
        raise ConfigError(f"{option} {text}: the words are numbered from 1 to {len(words)}.")
    listed = ", ".join(escape_text(word) for word in dict.fromkeys(words[:24])) + (", ..." if len(words) > 24 else "")
    raise ConfigError(f"{option} {escape_text(text)!r} is not a word of the sentence: {listed}.")


def choose_view(chosen: Example, start: str | None, rows: int | None, query: int | None) -> TableView:
    """Return the part of the sentence to show: from the given start, else so that it includes the query."""
    if rows is not None and rows < 1:
        raise ConfigError(f"--rows must be at least 1, got {rows}.")
    length = max(len(chosen.words), len(chosen.keys))
    count = rows or (max(length, ROWS) if length <= WHOLE else ROWS)
    first = max((query or 0) - count + 1, 0) if start is None else find_word(start, chosen, "--from")
    partial = first > 0 or count < length
    twice = any(len({*side}) < len(side) for side in (chosen.words, chosen.keys))
    long = rows is None and chosen.v is not None and chosen.v.shape[-1] > LONG
    return TableView(first, count, partial or twice, FEW if long else 0)


def move_focus_into_view(chosen: Example, view: TableView) -> Example:
    """Return the example with a focus that is shown."""
    part = view.get_range(len(chosen.words), True)
    return chosen if not chosen.words or chosen.focus in part else dataclasses.replace(chosen, focus=part.stop - 1)


def print_examples(console: Console) -> None:
    """Print every example with its sentence."""
    print_calculations(console, [Line(name, summarize_example(name)) for name in EXAMPLES])
    console.print()
    print_wrapped(console, Text("regard walk --example NAME shows one of them."))


def print_screen(console: Console, chosen: Example, shown: Sequence[ExampleStep], view: TableView, query: int | None) -> None:
    """Print the title, the steps, and what to try next."""
    print_wrapped(console, Text(chosen.title, style="bold"))
    if chosen.words:
        both = (chosen.sources, chosen.words) if chosen.sources else (chosen.words,)
        print_wrapped(console, Text(escape_text(" → ".join(format_sentence(words, view) for words in both))))
    print_wrapped(console, Text(f"Source: {chosen.source}", style="dim"))
    for note in (*chosen.notes, *list_remarks(console, chosen, shown, view)):
        print_wrapped(console, Text(escape_text(note), style="dim"))
    console.print()
    for number, step in enumerate(shown, 1):
        print_step(console, step, number, view)
    print_wrapped(console, Text(describe_next_step(chosen, query)))


def format_sentence(words: Sequence[str], view: TableView) -> str:
    """Return the words that are shown, with dots where there are more."""
    part = view.get_range(len(words), True)
    return "... " * (part.start > 0) + " ".join(words[part.start : part.stop]) + " ..." * (part.stop < len(words))


def list_remarks(console: Console, chosen: Example, shown: Sequence[ExampleStep], view: TableView) -> list[str]:
    """Return notes on how to read the tables."""
    remarks = []
    part = view.get_range(len(chosen.words), True)
    if len(part) < len(chosen.words):
        after = part.stop + 1 if part.stop < len(chosen.words) else 1
        remarks.append(
            f"Words {part.start + 1} to {part.stop} of {len(chosen.words)}: --from {after} moves on, --rows N shows more."
        )
    axes = {panel.axes for step in shown for panel in step.panels}
    if "pairs" in axes:
        remarks.append("In a table with words on both sides, the row is the query, the column the key it looks at.")
    if axes and get_palette(console):
        remarks.append("Color: in each table pale is its least number, deep its greatest.")
    if any(step.lines for step in shown) and chosen.steps is not None:
        remarks.append("Numbers are rounded for display; every sum is of the unrounded ones.")
    return remarks


def describe_next_step(chosen: Example, query: int | None) -> str:
    """Return what to try next."""
    follows = f"regard walk --example {chosen.leads_to}"
    if chosen.steps is None or query is not None:
        return f"Next: {follows} ({summarize_example(chosen.leads_to).partition(':')[0].rstrip('.')})."
    word = chosen.words[chosen.focus]
    query_text = shlex.quote(word) if chosen.words.count(word) == 1 and word.isprintable() else str(chosen.focus + 1)
    if chosen.name in ("own", "translated"):
        return f"Next: add --query {query_text} to write that row out; {follows} shows a worked example."
    name = "" if chosen.name == "simple" else f" --example {chosen.name}"
    return f"Next: regard walk{name} --query {query_text} writes that row out; {follows} goes on."


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
        {"title": one.title, "rows": one.rows, "columns": one.columns, "values": convert_tensor(one.values)}
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
