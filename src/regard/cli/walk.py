"""Run `regard walk`.

Exit code 2 if the words, files or settings cannot be used.
"""

import argparse
import json
import shlex
from collections.abc import Sequence
from importlib import import_module

from rich.console import Console
from rich.text import Text

from regard.cli.walk_screen import OWN_OPTIONS, Screen, choose_view, read_screen, read_screens, summarize_example
from regard.errors import ConfigError
from regard.lectures.example_steps import Line
from regard.show.terminal import (
    TableView,
    escape_text,
    get_palette,
    open_console,
    print_calculations,
    print_step,
    print_wrapped,
)

COMPUTED = ("model", "query", *OWN_OPTIONS)  # options of what is not in the file of screens


def run(options: argparse.Namespace) -> int:
    """Show the example, the list of examples, or the example's numbers."""
    if options.list:
        refuse_others(options)
        print_examples(open_console())
    elif options.json:
        print(json.dumps(import_module("regard.cli.walk_example").compute_json(options), allow_nan=False))
    else:
        print_screen(open_console(), *choose_screen(options))
    return 0


def refuse_others(options: argparse.Namespace) -> None:
    """Raise ConfigError if an option that --list does not read is given."""
    for name in ("example", *COMPUTED, "start", "rows", "json"):
        value = getattr(options, name)
        if value is not None and value is not False:
            flag = "from" if name == "start" else name
            raise ConfigError(f"--list only names the examples: leave out --{flag}.")


def choose_screen(options: argparse.Namespace) -> tuple[Screen, TableView]:
    """Return what is shown and the part of it, without PyTorch where it is an example of the lectures as a whole."""
    if all(getattr(options, name) is None for name in COMPUTED):
        screen = read_screen(options.example or "simple")
        view = choose_view(screen.name, screen.words, screen.keys, 0, options.start, options.rows, None)
        if not screen.words or screen.focus in view.get_range(len(screen.words), True):  # else they are on another word
            return screen, view
    computed: tuple[Screen, TableView] = import_module("regard.cli.walk_example").compute_screen(options)
    return computed


def print_examples(console: Console) -> None:
    """Print every example with its sentence."""
    print_calculations(console, [Line(name, summarize_example(name)) for name in read_screens()])
    console.print()
    print_wrapped(console, Text("regard walk --example NAME shows one of them."))


def print_screen(console: Console, chosen: Screen, view: TableView) -> None:
    """Print the title, the steps, and what to try next."""
    print_wrapped(console, Text(chosen.title, style="bold"))
    if chosen.words:
        both = (chosen.sources, chosen.words) if chosen.sources else (chosen.words,)
        print_wrapped(console, Text(escape_text(" → ".join(format_sentence(words, view) for words in both))))
    print_wrapped(console, Text(f"Source: {chosen.source}", style="dim"))
    for note in (*chosen.notes, *list_remarks(console, chosen, view)):
        print_wrapped(console, Text(escape_text(note), style="dim"))
    console.print()
    for number, step in enumerate(chosen.steps, 1):
        print_step(console, step, number, view)
    print_wrapped(console, Text(describe_next_step(chosen)))


def format_sentence(words: Sequence[str], view: TableView) -> str:
    """Return the words that are shown, with dots where there are more."""
    part = view.get_range(len(words), True)
    return "... " * (part.start > 0) + " ".join(words[part.start : part.stop]) + " ..." * (part.stop < len(words))


def list_remarks(console: Console, chosen: Screen, view: TableView) -> list[str]:
    """Return notes on how to read the tables."""
    remarks = []
    part = view.get_range(len(chosen.words), True)
    if len(part) < len(chosen.words):
        after = part.stop if part.stop < len(chosen.words) else 0
        remarks.append(
            f"Words {part.start} to {part.stop - 1} of {len(chosen.words)}: --from {after} moves on, --rows N shows more."
        )
    axes = {panel.axes for step in chosen.steps for panel in step.panels}
    if "pairs" in axes:
        remarks.append("In a table with words on both sides, the row is the query, the column the key it looks at.")
    if axes and get_palette(console):
        remarks.append("Color: in each table pale is its least number, deep its greatest.")
    if any(step.lines for step in chosen.steps) and chosen.has_arithmetic:
        remarks.append("Numbers are rounded for display; every sum is of the unrounded ones.")
    return remarks


def describe_next_step(chosen: Screen) -> str:
    """Return what to try next."""
    follows = f"regard walk --example {chosen.leads_to}"
    if not chosen.has_arithmetic or chosen.query is not None:
        return f"Next: {follows} ({summarize_example(chosen.leads_to).partition(':')[0].rstrip('.')})."
    word = chosen.words[chosen.focus]
    query_text = shlex.quote(word) if chosen.words.count(word) == 1 and word.isprintable() else str(chosen.focus)
    if chosen.name in ("own", "translated"):
        return f"Next: add --query {query_text} to write that row out; {follows} shows a worked example."
    name = "" if chosen.name == "simple" else f" --example {chosen.name}"
    return f"Next: regard walk{name} --query {query_text} writes that row out; {follows} goes on."
