"""What `regard walk` shows of an example; of the lectures' own it is in a file, because computing it imports PyTorch."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from regard.cli.arguments.walk import ROWS, WHOLE
from regard.errors import ConfigError
from regard.lectures.example_steps import ExampleStep, Line, StepTable, check_name
from regard.show.terminal import TableView, escape_text

FILE = Path(__file__).with_name("walk_screens.json")  # written by python -m docs.screens
LONG, FEW = 100, 6  # a vector of more than LONG numbers is shown by FEW of them
OWN_OPTIONS = ("words", "vectors", "weights", "heads", "mask", "seed")


@dataclass(frozen=True, eq=False, kw_only=True)
class Screen:
    """The steps of an example, or one row of it in arithmetic if there is a query, and what stands above and below them."""

    name: str
    title: str
    source: str
    words: tuple[str, ...]
    sources: tuple[str, ...]  # the words of the keys, if they differ from those of the queries
    focus: int
    notes: tuple[str, ...]
    leads_to: str
    steps: tuple[ExampleStep, ...]
    query: int | None = None
    has_arithmetic: bool = True

    @property
    def keys(self) -> tuple[str, ...]:
        """The words of the keys."""
        return self.sources or self.words


@cache
def read_screens() -> dict[str, Any]:
    """Read the lectures' examples, by name: a summary, and the fields of their screens."""
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def summarize_example(name: str) -> str:
    """Return what an example of the lectures shows, in a sentence."""
    summary: str = read_screens()[name]["summary"]
    return summary


def read_screen(name: str) -> Screen:
    """Return what is shown of an example of the lectures. Raises ConfigError if there is no such example."""
    found: dict[str, Any] = read_screens()[check_name(name, read_screens())]["screen"]
    lists = {key: tuple(part) for key, part in found.items() if isinstance(part, list)}
    return Screen(**(found | lists | {"steps": tuple(map(parse_step, found["steps"]))}))


def parse_step(found: dict[str, Any]) -> ExampleStep:
    """Parse a step that is shown."""
    panels = tuple(
        StepTable(
            [[float(number) for number in row] for row in one["values"]],
            tuple(one["rows"]),
            tuple(one["columns"]),
            one["axes"],
            one["title"],
        )
        for one in found["panels"]
    )
    lines = tuple(Line(**one) for one in found["lines"])
    return ExampleStep(found["name"], found["formula"], found["sentence"], panels, lines)


def find_word(text: str, words: Sequence[str], example: str, option: str) -> int:
    """Return the index of a word, given as it is written or as its number from 0, as in `regard look`."""
    if not words:
        raise ConfigError(f"the example '{example}' has no sentence, so {option} cannot be used.")
    found = [index for index, word in enumerate(words) if word == text]
    if len(found) == 1:
        return found[0]
    if found:
        numbers = [index if str(index) not in words else f"@{index}" for index in found]
        choices = " or ".join(f"{option} {number}" for number in numbers[:6])
        raise ConfigError(f"{escape_text(text)!r} occurs {len(found)} times in the sentence: use {choices}.")
    number = text.removeprefix("@")
    if number.isascii() and number.isdigit() and len(number) < 10:
        if int(number) < len(words):
            return int(number)
        raise ConfigError(f"{option} {text}: the words are numbered from 0 to {len(words) - 1}.")
    listed = ", ".join(escape_text(word) for word in dict.fromkeys(words[:24])) + (", ..." if len(words) > 24 else "")
    raise ConfigError(f"{option} {escape_text(text)!r} is not a word of the sentence: {listed}.")


def choose_view(
    example: str, words: Sequence[str], keys: Sequence[str], width: int, start: str | None, rows: int | None, query: int | None
) -> TableView:
    """Return the part of the sentence to show: from the given start, else so that it includes the query.

    Values have `width` numbers, 0 if that is not known.
    """
    if rows is not None and rows < 1:
        raise ConfigError(f"--rows must be at least 1, got {rows}.")
    length = max(len(words), len(keys))
    count = rows or (max(length, ROWS) if length <= WHOLE else ROWS)
    first = max((query or 0) - count + 1, 0) if start is None else find_word(start, words, example, "--from")
    partial = first > 0 or count < length
    twice = any(len({*side}) < len(side) for side in (words, keys))
    long = rows is None and width > LONG
    return TableView(first, count, partial or twice, FEW if long else 0)
