"""The steps of an example as they are shown: each a formula with numbers, words for rows and columns, and a sentence."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from regard.errors import ConfigError

if TYPE_CHECKING:  # what is shown of the lectures' own examples is printed without PyTorch
    from torch import Tensor

    from regard.mechanism import Steps

Axes = Literal["pairs", "words", "numbers"]  # rows and columns are words; only the rows; neither


@dataclass(frozen=True, eq=False)
class StepTable:
    """A table of numbers (r, c), as a tensor or as rows, with a label for each row and column."""

    values: Tensor | list[list[float]]
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    axes: Axes = "numbers"
    title: str = ""

    @property
    def numbers(self) -> list[list[float]]:
        """The rows of the table."""
        found: list[list[float]] = self.values if isinstance(self.values, list) else self.values.tolist()
        return found


@dataclass(frozen=True)
class Line:
    """A calculation written out, with the word or number that it is for."""

    label: str
    calculation: str


@dataclass(frozen=True, eq=False)
class ExampleStep:
    """A step for display: `name = formula`, then panels next to each other or lines, and a sentence about what happened."""

    name: str
    formula: str
    sentence: str
    panels: tuple[StepTable, ...] = ()
    lines: tuple[Line, ...] = ()

    @property
    def heading(self) -> str:
        """`scores = q kᵀ`; after a name of several words, and over calculations, with a colon instead of the sign."""
        equals = self.panels and " " not in self.name.replace(", ", ",")
        return f"{self.name} = {self.formula}" if equals else f"{self.name}: {self.formula}"


@dataclass(frozen=True, eq=False, kw_only=True)
class Example:
    """A sentence with every step of its attention, or what is shown if there is no sentence.

    q, k and v are (t, d) or (h, t, d), None if unknown; `steps` likewise, with scores scaled by `scale`.
    `formulas` and `sentences` replace the default text of a step, by its name.
    """

    name: str
    title: str
    source: str
    words: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()  # the words of the keys, if they differ from those of the queries
    focus: int = 0  # the query that the sentences describe
    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    weight: Tensor | None = None  # of the additive score
    scale: float = 1.0
    steps: Steps | None = None
    right: Steps | None = None  # the right steps, if the example's own are wrong
    formulas: Mapping[str, str] = field(default_factory=dict)
    sentences: Mapping[str, str] = field(default_factory=dict)
    before: tuple[ExampleStep, ...] = ()
    after: tuple[ExampleStep, ...] = ()
    notes: tuple[str, ...] = ()
    leads_to: str = ""  # the next example

    @property
    def keys(self) -> tuple[str, ...]:
        """The words of the keys."""
        return self.sources or self.words


def make_word_panel(values: Tensor, words: Sequence[str], letter: str, title: str = "") -> StepTable:
    """Make a panel with a row of numbers for each word, (t, c)."""
    return StepTable(values.detach(), tuple(words), number_labels(letter, values.shape[-1]), "words", title)


def make_matrix_panel(values: Tensor, rows: str, columns: str, title: str = "") -> StepTable:
    """Make a panel of a matrix of weights, with numbered rows and columns."""
    return StepTable(
        values.detach(), number_labels(rows, values.shape[0]), number_labels(columns, values.shape[1]), "numbers", title
    )


def number_labels(letter: str, count: int) -> tuple[str, ...]:
    """Make the labels x1, x2, ..."""
    return tuple(f"{letter}{number}" for number in range(1, count + 1))


def show_inputs(words: Sequence[str], x: Tensor) -> ExampleStep:
    """Show the vectors of a sentence."""
    every = f"Each of the {len(words)} words" if len(words) > 1 else "The word"
    sentence = f"{every} comes in as a vector of {x.shape[-1]} numbers: a row of x."
    return ExampleStep("x", "the vectors of the words", sentence, (make_word_panel(x, words, "x"),))


def show_matrices(weights: Mapping[str, Tensor], sentence: str) -> ExampleStep:
    """Show the weights that project x, each (d_in, d_out), by the names of their results."""
    panels = (make_matrix_panel(weight, "x", name[0], f"W_{name}") for name, weight in weights.items())
    return ExampleStep(", ".join(f"W_{name}" for name in weights), "the weights to train", sentence, tuple(panels))


def show_projections(words: Sequence[str], q: Tensor, k: Tensor, v: Tensor) -> ExampleStep:
    """Show the query, key and value of each word, (t, d) or (h, t, d)."""
    sentence = (
        "From its vector x, each word gets a query (what it looks for), a key (what it is found by) and a value (what it "
        "passes on). Queries are compared with keys; the resulting weights combine the values into the context."
    )
    named = (("query", "q", q), ("key", "k", k), ("value", "v", v))
    if q.dim() == 2:
        panels = [make_word_panel(part, words, letter, name) for name, letter, part in named]
    else:
        panels = [
            make_word_panel(part[head], words, letter, f"{name}, head {head + 1}")
            for head in range(len(q))
            for name, letter, part in named
        ]
    return ExampleStep("q, k, v", "x W_query, x W_key, x W_value", sentence, tuple(panels))


def check_name(name: str, names: Iterable[str]) -> str:
    """Return the name of an example, or raise ConfigError, which lists the valid names."""
    names = list(names)
    if name in names:
        return name
    close_names = difflib.get_close_matches(name, names, n=1)
    meant = f" Did you mean {close_names[0]}?" if close_names else ""
    raise ConfigError(f"there is no example {name!r}.{meant} The examples are: {', '.join(names)}.")
