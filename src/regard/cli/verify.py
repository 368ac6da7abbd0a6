"""Run `regard verify`.

Exit code 1 if a printed number differs from the computed one.
"""

import argparse
import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from torch import Tensor

from regard.lectures import printed_numbers
from regard.lectures.comparison import Verdict
from regard.lectures.verify import VerifiedClaim, verify
from regard.show.number_format import format_count
from regard.show.terminal import open_console, print_unpadded

NARROW, WIDE = 72, 120  # columns of the screen: below NARROW no table fits, from WIDE on a wide one does
STYLES = {Verdict.AGREES: "green", Verdict.WRONG: "bold yellow", Verdict.MISPRINT: "yellow", Verdict.DIFFERS: "bold red"}
PHRASES = {  # for one row, for several
    Verdict.AGREES: ("agrees", "agree"),
    Verdict.WRONG: ("agrees, but is wrong", "agree, but are wrong"),
    Verdict.MISPRINT: ("is a misprint", "are misprints"),
    Verdict.DIFFERS: ("differs", "differ"),
}
TITLES = ("example", "lectures", "compared", "off by", "allowed", "verdict")
WRAPPED = ("compared", "verdict")
TWO_LINE_TITLES = ("example\nlectures", "compared", "off by\nallowed", "verdict")


def run(options: argparse.Namespace) -> int:
    """Recompute and print. Return 0 if no printed number differs, 1 if one does."""
    rows = [row for example in dict.fromkeys(options.examples or [None]) for row in verify(example)]
    if options.json:
        print(json.dumps(convert_rows(rows), allow_nan=False))
    else:
        console = open_console()
        print_unpadded(console, make_screen(rows, console.width))
    return 0 if has_no_difference(rows) else 1


def has_no_difference(rows: Sequence[VerifiedClaim]) -> bool:
    """Return whether no row differs."""
    return all(row.verdict != Verdict.DIFFERS for row in rows)


def make_screen(rows: Sequence[VerifiedClaim], width: int) -> RenderableType:
    """Return the rows, the correct weights beside wrong ones, and a summary, for a screen of this width."""
    parts: list[RenderableType] = list(make_row_blocks(rows)) if width < NARROW else [make_table(rows, width)]
    parts += [show_both_weights(row, width) for row in rows if row.verdict == Verdict.WRONG]
    return Group(*parts, Text(summarize_rows(rows)))


def make_table(rows: Sequence[VerifiedClaim], width: int) -> Table:
    """Return a table with a line for each row; its note is below the fields that were compared."""
    is_wide = width >= WIDE
    table = Table(box=None, padding=(0, 2, 0 if is_wide else 1, 0), header_style="dim")
    for title in TITLES if is_wide else TWO_LINE_TITLES:
        numeric = title.startswith("off by") or title == "allowed"
        narrow = 10 if title == "verdict" and not is_wide else None
        table.add_column(title, justify="right" if numeric else "left", no_wrap=title not in WRAPPED, max_width=narrow)
    for row in rows:
        name, source, about = Text(row.example, "bold"), Text(format_lectures(row), "dim"), describe_comparison(row)
        difference, allowed = Text(format_brief(row.difference)), Text(format_brief(row.tolerance), "dim")
        verdict = Text(row.verdict, STYLES[row.verdict])
        if is_wide:
            table.add_row(name, source, about, difference, allowed, verdict)
        else:
            table.add_row(Group(name, source), about, Group(difference, allowed), verdict)
    return table


def make_row_blocks(rows: Sequence[VerifiedClaim]) -> Iterator[RenderableType]:
    """Yield a few lines for each row, for a screen that is too narrow for a table."""
    for row in rows:
        yield Text.assemble((row.example, "bold"), ": ", (row.verdict, STYLES[row.verdict]))
        difference = f"off by {format_brief(row.difference)}, allowed {format_brief(row.tolerance)}"
        lines = Group(describe_comparison(row), Text(difference), Text(f"lectures {format_lectures(row)}", "dim"))
        yield Padding(lines, (0, 0, 1, 2))


def describe_comparison(row: VerifiedClaim) -> Text:
    """Return the fields that were compared, and the note on them."""
    return Text.assemble(list_fields(row), ("\n" + row.note if row.note else "", "italic"))


def show_both_weights(row: VerifiedClaim, width: int) -> RenderableType:
    """Return the weights that are wrong, and the correct ones if the example has them."""
    example = printed_numbers.get_printed_example(row.example)
    words = printed_numbers.load_sentence(example["input"])[0]
    digits = 4 if width >= WIDE else 2
    titles = {"weights": "weights as printed", "correct_weights": "weights as they should be"}
    both = [
        Padding(make_weight_table(printed_numbers.parse_tensor(example[field]), words, title, digits), (0, 3, 1, 0))
        for field, title in titles.items()
    ]
    above = Text("\n" if width >= WIDE else "")  # the wide table ends without a blank line
    return Group(Text.assemble(above, (row.example, "bold")), Columns(both, padding=0))


def make_weight_table(weights: Tensor, words: Sequence[str], title: str, digits: int) -> Table:
    """Return a table of weights with their words; nonzero weights on later words are red."""
    table = Table(title=title, title_justify="left", title_style="", box=None, padding=(0, 1, 0, 0), header_style="dim")
    for heading in ("", *words):
        table.add_column(heading, justify="right", no_wrap=True)
    for i, entries in enumerate(weights.tolist()):
        cells = [
            Text(f"{entry:.{digits}f}" if entry else "0", "red" if j > i and entry else "") for j, entry in enumerate(entries)
        ]
        table.add_row(Text(words[i], "dim"), *cells)
    return table


def summarize_rows(rows: Sequence[VerifiedClaim]) -> str:
    """Return a sentence with the counts of the verdicts."""
    counts = Counter(row.verdict for row in rows)
    verdicts = [verdict for verdict in Verdict if counts[verdict] or verdict == Verdict.DIFFERS]
    found = "; ".join(f"{counts[verdict]} {PHRASES[verdict][counts[verdict] != 1]}" for verdict in verdicts)
    examples = format_count(len({row.example for row in rows}), "example")
    numbers = format_count(sum(row.numbers for row in rows), "number")
    return f"{numbers} of {examples} computed again. Of {format_count(len(rows), 'row')} {found}."


def list_fields(row: VerifiedClaim) -> str:
    """List the fields that were compared, grouped by table."""
    tables: dict[str, list[str]] = {}
    for comparison in row.comparisons:
        table, _, field = comparison.field.partition(".")
        tables.setdefault(table, []).extend([field] if field else [])
    return ", ".join(f"{table} ({', '.join(inner)})" if inner else table for table, inner in tables.items())


def format_lectures(row: VerifiedClaim) -> str:
    """Return the lectures that print an example."""
    return row.source.replace(",", ", ")


def format_brief(number: float) -> str:
    """Format a number with two significant digits."""
    return f"{number:.2g}"


def convert_rows(rows: Sequence[VerifiedClaim]) -> dict[str, Any]:
    """Return the rows as JSON values: what the screen shows, and the numbers on both sides. -inf, inf and nan are strings."""
    return {
        "ok": has_no_difference(rows),
        "numbers": sum(row.numbers for row in rows),
        "rows": [convert_row(row) for row in rows],
    }


def convert_row(row: VerifiedClaim) -> dict[str, Any]:
    """Return one row as JSON values."""
    compared = [
        {
            "field": comparison.field,
            "difference": round_numbers(comparison.difference),
            "printed": round_numbers(comparison.printed.tolist()),
            "computed": round_numbers(comparison.computed.tolist()),
        }
        for comparison in row.comparisons
    ]
    names = {"example": row.example, "source": row.source, "mechanism": row.mechanism, "verdict": row.verdict, "note": row.note}
    return {**names, "difference": round_numbers(row.difference), "tolerance": row.tolerance, "compared": compared}


def round_numbers(numbers: Any) -> Any:
    """Round numbers to seven significant digits, as JSON values."""
    if isinstance(numbers, list):
        return [round_numbers(number) for number in numbers]
    return float(f"{numbers:.7g}") if math.isfinite(numbers) else str(numbers)
