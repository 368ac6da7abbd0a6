"""Run `regard look`.

Exit code 2 if the model, the text or the settings cannot be used.
"""

import argparse
import re
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from rich.console import Console
from rich.text import Text

from regard.cli.foreign import Opened, opened
from regard.cli.progress import each, watched
from regard.errors import ConfigError, DataError
from regard.observe import Recording, record
from regard.observe.heads import Heads, Wanted
from regard.observe.heads import each as typed
from regard.observe.recording import KINDS
from regard.show import closer
from regard.show.axes import attention_of, byte_note
from regard.show.grids import grids
from regard.show.observed import clearest, kinds, links, table
from regard.show.page.onefile import page
from regard.show.swatches import window
from regard.show.terminal import literal, open_console, palette, write

FILE = re.compile(r"[~.]*/\S*|\S*/\S*\.\w+|.*\.(txt|md)|\S*\w\.[a-z]\w{1,4}")  # pattern of a file name


def run(options: argparse.Namespace) -> int:
    """Run the model, classify its heads and print."""
    if options.tokens is not None and options.tokens < 1:
        raise ConfigError(f"--tokens must be at least 1, got {options.tokens}.")
    if options.head is not None:
        closer.placed(options.head)  # an invalid head is refused before the model runs
    text = read(options.text)
    foreign = opened(options.model)
    recording, line = recorded(foreign, text, options)
    if options.out:
        recording.save(options.out)
        line += f" Saved to {options.out}."
    if options.page:
        page(recording, options.page)
        line += f" Page: {options.page}."
    report(recording, options, line)
    return 0


def read(text: str) -> str:
    """Return the text of a file, of standard input, or the argument itself."""
    if text == "-":
        return sys.stdin.read()
    try:
        path = Path(text)
        found = path.read_text(encoding="utf-8") if path.is_file() else text
        folder = path.is_dir() and bool(text.strip())
    except UnicodeDecodeError as error:
        raise DataError(f"{text} is not UTF-8 text: {error.reason} at byte {error.start}.") from None
    except OSError:  # e.g. a name that is too long
        return text
    if folder:
        raise DataError(f"{text} is a folder: give a file in it. To use it as words, pass it on standard input: -.")
    if found == text and FILE.fullmatch(text):
        raise DataError(f"{text} is not a file. To use it as words, pass it on standard input: -.")
    return found


def recorded(foreign: Opened, text: str, options: argparse.Namespace) -> tuple[Recording, str]:
    """Return the recording of a model on the first tokens of a text, and a sentence about it."""
    ids, words, whole = foreign.tokens(text, options.tokens)
    start = time.perf_counter()
    recorder = record(foreign.model, keep=options.keep)
    with torch.inference_mode(), recorder as recording, watched("running", lambda: len(recording.calls), foreign.layers):
        foreign.run(ids)
    seconds = time.perf_counter() - start
    recording.model = foreign.name
    recording.tokens = words
    cut = f" of {whole:,}" if len(words) < whole else ""
    beyond = foreign.context is not None and len(words) > foreign.context
    note = f" The model's context is {foreign.context:,}." if beyond else ""
    spelled = byte_note(words)
    note += f" {spelled}" if spelled else ""
    return recording, f"{len(words):,}{cut} token{'s' * (whole != 1)} in {seconds:.1f} s.{note}"


def report(recording: Recording, options: argparse.Namespace, line: str = "") -> None:
    """Print the requested part of a recording: a head, a row, or an overview."""
    console = open_console()
    place = None if options.head is None else closer.placed(options.head)
    kind = attention_of(recording, options.attention)
    line = f"{line} {of_kinds(recording, kind)}".strip()
    if options.query is not None:
        lines = list(closer.row(recording, place, options.query, window(console), options.all, kind))
    elif place is not None:
        lines = list(closer.head(recording, place, window(console), kind))
    else:
        overview(console, recording, options, line, kind)
        return
    write(console, Text(f"{literal(recording.model)}: {line}"))
    put(console, lines)


def of_kinds(recording: Recording, kind: str) -> str:
    """Return a note on the kind of attention that is shown; empty if there is only self attention."""
    other = next((one for one in KINDS if one != kind and recording.layers(one)), None)
    what = ["This is cross attention, of one text to another."] if kind == "cross" else []
    return " ".join([*what, *([f"There is {other} attention too: --attention {other}."] if other else [])])


def put(console: Console, lines: Iterable[Text]) -> None:
    """Print lines that were formatted for the console's width."""
    for line in lines:
        console.print(line, no_wrap=True, overflow="crop")


def overview(console: Console, recording: Recording, options: argparse.Namespace, line: str, kind: str) -> None:
    """Print the kinds of heads, the words, the table of the heads and their strongest links."""
    names = recording.layers(kind)
    wanted, count = Wanted(recording.tokens), len(names) * recording.map(0, kind=kind).shape[1]
    heads = Heads(tuple(each("classifying heads", typed(recording, wanted, kind=kind), count)), wanted.notes(kind))
    if options.kind is not None and not len(heads.of(options.kind)):
        there = ", ".join(dict.fromkeys(row.kind for row in heads))
        raise ConfigError(f"no head is of kind {options.kind!r}; the kinds here are {there}.")
    shown = heads.of(options.kind) if options.kind else heads
    shown = shown.sorted(options.sort) if options.sort else shown
    counts = ", ".join(f"{n} {one}{'s' * (n != 1)}" for n, one in ((len(names), "layer"), (len(heads), "head")))
    write(console, Text(f"{literal(recording.model)}: {counts}. {line}".strip(), style="bold"))
    put(console, kinds(heads, console.width))
    whole = options.all or bool(options.kind or options.sort)
    parts = (
        closer.text(recording, window(console), options.all, kind),
        table(shown, console.width, whole),
        links(recording, shown, console.width, kind),
        grids(recording, shown if whole else clearest(shown), console.width, palette(console), kind),
    )
    for part in parts:
        lines = list(part)
        put(console, [Text(), *lines] if lines else [])
