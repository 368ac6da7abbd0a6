"""What an example shows: scenes, each a formula with numbers, words for their rows and columns, and a plain sentence."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from regard.lectures.figures import figure
from regard.mechanism import Steps

Axes = Literal["pairs", "words", "numbers"]  # rows and columns are words; only the rows are; neither are


@dataclass(frozen=True, eq=False)
class Panel:
    """A table of numbers (r, c) with a label for each row and column."""

    values: Tensor
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    axes: Axes = "numbers"
    title: str = ""


@dataclass(frozen=True)
class Line:
    """A calculation written out, with the word or number that it is for."""

    label: str
    calculation: str


@dataclass(frozen=True, eq=False)
class Scene:
    """A step as it is shown: `name = formula`, then panels side by side or lines, and what happened in one sentence."""

    name: str
    formula: str
    sentence: str
    panels: tuple[Panel, ...] = ()
    lines: tuple[Line, ...] = ()

    @property
    def heading(self) -> str:
        """`scores = q kᵀ`; after a name of several words, and over arithmetic, a colon stands for the sign."""
        equals = self.panels and " " not in self.name.replace(", ", ",")
        return f"{self.name} = {self.formula}" if equals else f"{self.name}: {self.formula}"


@dataclass(frozen=True, eq=False, kw_only=True)
class Example:
    """A sentence with every step of its attention, or scenes alone where no sentence is attended to.

    q, k and v are (t, d) or (h, t, d), None where they are not known; `steps` likewise, scores scaled by `scale`.
    `formulas` and `sentences` speak of a step, by its name, where something else is to be said than of any attention.
    """

    name: str
    title: str
    source: str
    words: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()  # the words of the keys, where they are others
    focus: int = 0  # the query that the sentences speak of
    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    weight: Tensor | None = None  # of the additive score
    scale: float = 1.0
    steps: Steps | None = None
    right: Steps | None = None  # the right steps, where the example's own are wrong
    formulas: Mapping[str, str] = field(default_factory=dict)
    sentences: Mapping[str, str] = field(default_factory=dict)
    before: tuple[Scene, ...] = ()
    after: tuple[Scene, ...] = ()
    notes: tuple[str, ...] = ()
    leads_to: str = ""  # the example to look at next

    @property
    def keys(self) -> tuple[str, ...]:
        """The words that are looked at."""
        return self.sources or self.words


def of_words(values: Tensor, words: Sequence[str], letter: str, title: str = "") -> Panel:
    """A row of numbers for each word, (t, c)."""
    return Panel(values.detach(), tuple(words), numbered(letter, values.shape[-1]), "words", title)


def matrix(values: Tensor, rows: str, columns: str, title: str = "") -> Panel:
    """A matrix of weights, its rows and columns counted."""
    return Panel(values.detach(), numbered(rows, values.shape[0]), numbered(columns, values.shape[1]), "numbers", title)


def numbered(letter: str, count: int) -> tuple[str, ...]:
    """x1, x2, ..."""
    return tuple(f"{letter}{number}" for number in range(1, count + 1))


def inputs(words: Sequence[str], x: Tensor) -> Scene:
    """The vectors of a sentence."""
    every = f"Each of the {len(words)} words" if len(words) > 1 else "The word"
    sentence = f"{every} comes in as a vector of {x.shape[-1]} numbers: a row of x."
    return Scene("x", "the vectors of the words", sentence, (of_words(x, words, "x"),))


def matrices(weights: Mapping[str, Tensor], sentence: str) -> Scene:
    """The weights that project x, each (d_in, d_out), by the names of what they give."""
    panels = (matrix(weight, "x", name[0], f"W_{name}") for name, weight in weights.items())
    return Scene(", ".join(f"W_{name}" for name in weights), "the weights to train", sentence, tuple(panels))


def projected(words: Sequence[str], q: Tensor, k: Tensor, v: Tensor) -> Scene:
    """What each word asks, offers and hands over, (t, d) or (h, t, d)."""
    sentence = "What a word asks for (its query), what it is found by (its key), and what it hands over (its value)."
    named = (("query", "q", q), ("key", "k", k), ("value", "v", v))
    if q.dim() == 2:
        panels = [of_words(part, words, letter, name) for name, letter, part in named]
    else:
        panels = [
            of_words(part[head], words, letter, f"{name}, head {head + 1}")
            for head in range(len(q))
            for name, letter, part in named
        ]
    return Scene("q, k, v", "x W_query, x W_key, x W_value", sentence, tuple(panels))


def lectures(name: str) -> str:
    """Where a figure is printed."""
    numbers = figure(name)["source"].replace(",", ", ")
    return f"lecture{'s' if ',' in numbers else ''} {numbers}"
