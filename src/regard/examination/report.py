"""The report of an examination: what it found, what it checked and how closely, and what it cannot determine."""

import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor

from regard.html_repr import HtmlRepr
from regard.terminal_escapes import escape_controls

WIDTH = 80  # columns of the table
MARGIN = 23  # columns for the kind of a finding
NARROW, HANG = 60, 2  # below so many columns a kind has a line of its own, and the text below it so many fewer columns
LEAST_WIDTH = 20  # columns
POINT = "- "  # before each property
BRIEF = 230  # characters that pytest shows of an asserted value
SIDE = 16  # tokens; the text has no picture of more


UNUSED_HEADS = "unused heads"  # a cause of findings, of which the strongest says all


@dataclass(frozen=True)
class Finding:
    """A mistake: its kind, the smallest evidence, and a sentence with the line of code that usually fixes it.

    Findings of one `cause` are one mistake seen from several sides; the strongest of them come first. `layer` is the module of
    a model that has it, "" if it belongs to no single layer; `layers` are all of them if several do.
    """

    kind: str
    evidence: str
    cure: str
    strength: float = 1.0
    cause: str = ""
    layer: str = ""
    layers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))  # a list, where it was read from JSON


@dataclass(frozen=True)
class Checked:
    """A property that was found right, and the smallest mistake that would have been detected."""

    what: str
    sensitivity: str


@dataclass(frozen=True)
class Unknown:
    """A property that the subject does not show, and what to pass to determine it.

    A report that lacks a property with `is_required` is inconclusive: who sees whom, rows of weights, the scale.
    """

    what: str
    needs: str
    is_required: bool = False


@dataclass(frozen=True, eq=False)
class Visibility:
    """Who sees whom, bool (q, k), expected and found; `strength` is relative to the largest in its row, NaN if not measured."""

    expected: Tensor
    found: Tensor
    strength: Tensor
    words: tuple[str, ...]  # of the keys; the queries are the last of them

    @property
    def measured_rows(self) -> Tensor:
        """Which rows were measured, bool (q,)."""
        return ~self.strength.isnan().any(-1)

    @property
    def difference(self) -> Tensor:
        """1 where a query sees a key that it may not, -1 where it misses one that it may; (q, k)."""
        return (self.found.int() - self.expected.int()) * self.measured_rows.unsqueeze(-1)

    @property
    def has_differences(self) -> bool:
        """Whether the picture shows anything other than what was expected."""
        return bool(self.difference.any()) or not bool(self.measured_rows.all())

    def draw(self, width: int = WIDTH) -> str:
        """Draw expected, found and difference, a line for each query: side by side, or one below the other if too wide.

        ■ sees, · does not, + may not but does, - may but does not, ? was not measured.
        """
        q, k = self.expected.shape
        words = self.words[len(self.words) - q :]
        margin, room = max(map(len, words)) + 2, max(2 * k, len("difference")) + 2
        columns = self.format_columns()
        names = [f"{word:{margin}}" for word in ("", *words)]
        rows = ["".join(f"{one:{room}}" for one in row) for row in zip(*columns, strict=True)]
        wide = [f"{name}{row}".rstrip() for name, row in zip(names, rows, strict=True)]
        if max(map(len, wide)) <= width:
            return "\n".join(wide)
        blocks = [[f"{name}{one}".rstrip() for name, one in zip(names, column, strict=True)] for column in columns]
        return "\n\n".join("\n".join(lines) for lines in blocks)

    def format_columns(self) -> list[list[str]]:
        """Return the title and the marks of each query's row, of what is expected, found and different."""
        expected = [format_marks(row, "■") for row in self.expected.int()]
        found, difference = (
            [format_marks(row, sign) for row in t] for sign, t in (("■", self.found.int()), ("+", self.difference))
        )
        unmeasured = "? " * self.expected.shape[1]
        for i in (~self.measured_rows).nonzero().flatten().tolist():
            found[i] = difference[i] = unmeasured
        return [["expected", *expected], ["found", *found], ["difference", *difference]]


@dataclass(frozen=True, eq=False)
class Report(HtmlRepr):
    """The result of an examination; true if nothing was found and everything that the verdict requires was examined.

    With `strict` False it is true if nothing was found.
    """

    subject: str
    expects: str
    findings: tuple[Finding, ...] = ()
    checked: tuple[Checked, ...] = ()
    unknown: tuple[Unknown, ...] = ()
    notes: tuple[str, ...] = ()  # how the subject was called
    reach: Visibility | None = None
    strict: bool = True

    @property
    def ok(self) -> bool:
        """Whether nothing was found, and, if `strict`, everything that the verdict requires was examined."""
        return not self.findings and not self.missing

    @property
    def missing(self) -> tuple[Unknown, ...]:
        """What the verdict requires and was not examined, the one with the least to pass first; empty if not `strict`."""
        return tuple(sorted((one for one in self.unknown if one.is_required and self.strict), key=lambda one: len(one.needs)))

    @property
    def is_inconclusive(self) -> bool:
        """Whether nothing was found, but something that the verdict requires was not examined."""
        return not self.findings and bool(self.missing)

    def __bool__(self) -> bool:
        return self.ok

    def __repr__(self) -> str:
        """Return one line, short enough that a failed assertion shows it in full."""
        sentence = "; ".join(f"{one.kind}: {one.evidence}" for one in self.findings)
        if self.is_inconclusive:
            sentence = f"cannot tell {self.missing[0].what}. Needed: {self.missing[0].needs}"
        line = escape_controls(f"{self.verdict}. {sentence}" if sentence else f"{self.verdict}.")
        return line if len(line) <= BRIEF else line[: BRIEF - 1] + "…"

    def __str__(self) -> str:
        """Return the report as a table of at most 80 columns, with control characters in names as escapes."""
        return self.format_table(WIDTH)

    def format_table(self, width: int) -> str:
        """Return the report as a table of at most this many columns, with control characters in names as escapes."""
        width = max(width, LEAST_WIDTH)
        parts = [wrap_text(self.verdict + f" (expects {self.expects})", width)]
        parts += [[*format_entry(one.kind, one.evidence, width), *format_entry("", one.cure, width)] for one in self.findings]
        missing = self.missing if self.is_inconclusive else ()
        parts += [format_results("inconclusive", missing, width)] if missing else []
        rest = tuple(one for one in self.unknown if one not in missing)
        if self.findings and self.reach is not None and len(self.reach.words) <= SIDE and self.reach.has_differences:
            parts.append(self.reach.draw(width).splitlines())
        results = (format_results("checked", self.checked, width), format_results("cannot tell", rest, width))
        parts += [lines for lines in results if lines]
        if self.notes:
            parts.append(format_entry("called", "; ".join(self.notes), width))
        return "\n\n".join("\n".join(map(escape_controls, lines)) for lines in parts)

    @property
    def verdict(self) -> str:
        """The first line: the name of the subject, and the number of findings or that the report is inconclusive."""
        count = len(self.findings)
        if self.is_inconclusive:
            return f"{self.subject}: inconclusive"
        return f"{self.subject}: {'no finding' if not count else '1 finding' if count == 1 else f'{count} findings'}"

    def json(self) -> dict[str, Any]:
        """Return the whole report as json.dumps takes it."""
        results = {name: [asdict(one) for one in getattr(self, name)] for name in ("findings", "checked", "unknown")}
        return {
            "subject": self.subject,
            "expects": self.expects,
            "ok": self.ok,
            "inconclusive": self.is_inconclusive,
            **results,
            "notes": list(self.notes),
            "reach": None if self.reach is None else convert_visibility_to_json(self.reach),
        }


def prepend_results(report: Report, results: Iterable[object]) -> Report:
    """Return a report with further results, their findings first."""
    results = tuple(results)
    findings = tuple(one for one in results if isinstance(one, Finding))
    checked = tuple(one for one in results if isinstance(one, Checked))
    unknown = tuple(one for one in results if isinstance(one, Unknown))
    return replace(
        report, findings=findings + report.findings, checked=report.checked + checked, unknown=report.unknown + unknown
    )


def count_calls(calls: Sequence[object]) -> str:
    """Format the number of recorded calls."""
    return f"{len(calls)} recorded call{'s' * (len(calls) > 1)}"


def format_results(title: str, results: tuple[Checked, ...] | tuple[Unknown, ...], width: int) -> list[str]:
    """Format what was checked or cannot be determined, a point for each; what several have in common is below them."""
    groups: dict[str, list[str]] = {}
    for one in results:
        groups.setdefault(one.sensitivity if isinstance(one, Checked) else f"Needed: {one.needs}", []).append(one.what)
    room, lines = measure_room(width), list[str]()
    for last, whats in groups.items():
        lines += [line for what in whats for line in wrap_text(what, room, POINT)]
        lines += wrap_text(last, room, 2 * len(POINT) * " ")
    return place_beside(title, lines, width) if lines else []


def format_entry(title: str, text: str, width: int) -> list[str]:
    """Format a title in the margin and text beside it, or below it where lines are short, in as many lines as needed."""
    return place_beside(title, wrap_text(text, measure_room(width)), width)


def place_beside(title: str, lines: list[str], width: int) -> list[str]:
    """Place lines beside a title in the margin, or below it where lines are short."""
    if width < NARROW:
        return [*([title] if title else []), *(f"{'':{HANG}}{line}" for line in lines)]
    return [f"{title if n == 0 else '':{MARGIN}}{line}".rstrip() for n, line in enumerate(lines)]


def measure_room(width: int) -> int:
    """Return the columns of a line beside or below its title."""
    return width - (HANG if width < NARROW else MARGIN)


def wrap_text(text: str, width: int, point: str = "") -> list[str]:
    """Return text as lines of at most this many columns, one at least; a point is before the first, and room below it."""
    after = " " * len(point)
    return textwrap.wrap(text, width, initial_indent=point, subsequent_indent=after, break_on_hyphens=False) or [""]


def format_marks(row: Tensor, sign: str) -> str:
    """Format a row of the picture."""
    return "".join(f"{sign if at > 0 else '-' if at < 0 else '·'} " for at in row.tolist())


def convert_visibility_to_json(sight: Visibility) -> dict[str, Any]:
    """Return the tables of a picture as lists; strengths that were not measured are None."""
    strength = [[None if math.isnan(number) else number for number in row] for row in sight.strength.tolist()]
    return {
        "words": list(sight.words),
        "expected": sight.expected.tolist(),
        "found": sight.found.tolist(),
        "strength": strength,
    }
