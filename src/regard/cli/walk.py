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
from regard.cli.own_words import own_example
from regard.cli.translated_words import translated_example
from regard.errors import ConfigError
from regard.lectures.examples import EXAMPLES, example, summary
from regard.lectures.scenes import Example, Line, Scene
from regard.show.arithmetic import arithmetic
from regard.show.narration import tell
from regard.show.terminal import View, calculations, literal, open_console, palette, show, write

LONG, FEW = 100, 6  # a vector of more than LONG numbers is shown by FEW of them
OWN = ("words", "vectors", "weights", "heads", "mask", "seed")


def run(options: argparse.Namespace) -> int:
    """Show the example, the list of examples, or the example's numbers."""
    if options.list:
        listing(open_console())
        return 0
    chosen = chosen_example(options)
    query = None if options.query is None else place(options.query, chosen, "--query")
    view = view_of(chosen, options.start, options.rows, query)
    chosen = seen(chosen, view)
    if options.json:
        print(json.dumps(record(chosen, query), allow_nan=False))
        return 0
    scenes = tell(chosen) if query is None else arithmetic(chosen, query, view.part(len(chosen.keys), True))
    screen(open_console(), chosen, scenes, view, query)
    return 0


def chosen_example(options: argparse.Namespace) -> Example:
    """Return the lectures' example, or the one made from the user's own words."""
    own = [name for name in OWN if getattr(options, name) is not None]
    if options.model is not None:
        return of_model(options, own)
    if not own:
        return example(options.example or "simple")
    if options.example is not None:
        raise ConfigError(f"--example shows a sentence of the lectures unchanged: leave out --{own[0]}, or --example.")
    return own_example(options)


def of_model(options: argparse.Namespace, own: Sequence[str]) -> Example:
    """Return the attention of a trained translator; only the words are the user's."""
    if options.example not in (None, "additive"):
        raise ConfigError(
            f"--model shows a translator's additive attention: use --example additive with it, got {options.example}."
        )
    other = next((name for name in own if name != "words"), None)
    if other is not None:
        raise ConfigError(f"--model has its own vectors and weights: leave out --{other}, or --model.")
    return translated_example(options.model, options.words)


def place(text: str, chosen: Example, option: str) -> int:
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
        raise ConfigError(f"{literal(text)!r} occurs {len(found)} times in the sentence: use {choices}.")
    number = text.removeprefix("@")
    if number.isascii() and number.isdigit() and len(number) < 10:
        if 1 <= int(number) <= len(words):
            return int(number) - 1
        raise ConfigError(f"{option} {text}: the words are numbered from 1 to {len(words)}.")
    listed = ", ".join(literal(word) for word in dict.fromkeys(words[:24])) + (", ..." if len(words) > 24 else "")
    raise ConfigError(f"{option} {literal(text)!r} is not a word of the sentence: {listed}.")


def view_of(chosen: Example, start: str | None, rows: int | None, query: int | None) -> View:
    """Return the part of the sentence to show: from the given start, else so that it includes the query."""
    if rows is not None and rows < 1:
        raise ConfigError(f"--rows must be at least 1, got {rows}.")
    length = max(len(chosen.words), len(chosen.keys))
    count = rows or (max(length, ROWS) if length <= WHOLE else ROWS)
    first = max((query or 0) - count + 1, 0) if start is None else place(start, chosen, "--from")
    partial = first > 0 or count < length
    twice = any(len({*side}) < len(side) for side in (chosen.words, chosen.keys))
    long = rows is None and chosen.v is not None and chosen.v.shape[-1] > LONG
    return View(first, count, partial or twice, FEW if long else 0)


def seen(chosen: Example, view: View) -> Example:
    """Return the example with a focus that is shown."""
    part = view.part(len(chosen.words), True)
    return chosen if not chosen.words or chosen.focus in part else dataclasses.replace(chosen, focus=part.stop - 1)


def listing(console: Console) -> None:
    """Print every example with its sentence."""
    calculations(console, [Line(name, summary(name)) for name in EXAMPLES])
    console.print()
    write(console, Text("regard walk --example NAME shows one of them."))


def screen(console: Console, chosen: Example, scenes: Sequence[Scene], view: View, query: int | None) -> None:
    """Print the title, the scenes, and what to try next."""
    write(console, Text(chosen.title, style="bold"))
    if chosen.words:
        both = (chosen.sources, chosen.words) if chosen.sources else (chosen.words,)
        write(console, Text(literal(" → ".join(sentence(words, view) for words in both))))
    write(console, Text(f"Source: {chosen.source}", style="dim"))
    for note in (*chosen.notes, *remarks(console, chosen, scenes, view)):
        write(console, Text(literal(note), style="dim"))
    console.print()
    for number, scene in enumerate(scenes, 1):
        show(console, scene, number, view)
    write(console, Text(closing(chosen, query)))


def sentence(words: Sequence[str], view: View) -> str:
    """Return the words that are shown, with dots where there are more."""
    part = view.part(len(words), True)
    return "... " * (part.start > 0) + " ".join(words[part.start : part.stop]) + " ..." * (part.stop < len(words))


def remarks(console: Console, chosen: Example, scenes: Sequence[Scene], view: View) -> list[str]:
    """Return notes on how to read the tables."""
    said = []
    part = view.part(len(chosen.words), True)
    if len(part) < len(chosen.words):
        after = part.stop + 1 if part.stop < len(chosen.words) else 1
        said.append(
            f"Words {part.start + 1} to {part.stop} of {len(chosen.words)}: --from {after} moves on, --rows N shows more."
        )
    axes = {panel.axes for scene in scenes for panel in scene.panels}
    if "pairs" in axes:
        said.append("In a table with words on both sides, the row is the query, the column the key it looks at.")
    if axes and palette(console):
        said.append("Color: in each table pale is its least number, deep its greatest.")
    if any(scene.lines for scene in scenes) and chosen.steps is not None:
        said.append("Numbers are rounded for display; every sum is of the unrounded ones.")
    return said


def closing(chosen: Example, query: int | None) -> str:
    """Return what to try next."""
    follows = f"regard walk --example {chosen.leads_to}"
    if chosen.steps is None or query is not None:
        return f"Next: {follows} ({summary(chosen.leads_to).partition(':')[0].rstrip('.')})."
    word = chosen.words[chosen.focus]
    asked = shlex.quote(word) if chosen.words.count(word) == 1 and word.isprintable() else str(chosen.focus + 1)
    if chosen.name in ("own", "translated"):
        return f"Next: add --query {asked} to write that row out; {follows} shows a worked example."
    name = "" if chosen.name == "simple" else f" --example {chosen.name}"
    return f"Next: regard walk{name} --query {asked} writes that row out; {follows} goes on."


def record(chosen: Example, query: int | None) -> dict[str, Any]:
    """Return the example as JSON values: every step by name, and the scenes."""
    steps = {} if chosen.steps is None else {name: numbers(step) for name, step in chosen.steps.items()}
    right = {} if chosen.right is None else {"right": {name: numbers(step) for name, step in chosen.right.items()}}
    asked = {} if query is None else {"query": query, "arithmetic": [told(scene) for scene in arithmetic(chosen, query)]}
    return {
        "example": chosen.name,
        "title": chosen.title,
        "source": chosen.source,
        "words": chosen.words,
        **({"sources": chosen.sources} if chosen.sources else {}),
        "notes": chosen.notes,
        "scale": chosen.scale,
        **{name: numbers(part) for name in (*"qkv", "weight") if (part := getattr(chosen, name)) is not None},
        "steps": steps,
        **right,
        "scenes": [told(scene) for scene in tell(chosen)],
        **asked,
    }


def told(scene: Scene) -> dict[str, Any]:
    """Return a scene as JSON values."""
    panels = [
        {"title": one.title, "rows": one.rows, "columns": one.columns, "values": numbers(one.values)} for one in scene.panels
    ]
    lines = [{"label": line.label, "calculation": line.calculation} for line in scene.lines]
    return {"name": scene.name, "formula": scene.formula, "sentence": scene.sentence, "panels": panels, "lines": lines}


def numbers(values: Tensor) -> Any:
    """Return a tensor as lists, each number in the fewest digits that restore its float32, as a string if JSON has none."""
    if values.dim():
        return [numbers(part) for part in values] if values.dim() > 1 else [digits(number) for number in values.numpy()]
    return digits(values.numpy()[()])


def digits(number: Any) -> float | str:
    """Return one number as a JSON value."""
    return float(str(number)) if np.isfinite(number) else str(number)
