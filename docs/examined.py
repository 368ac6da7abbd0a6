"""The tables of docs/examine.md, of layers of tests/examination and of public ones: `python -m docs.examined [NAME ...]`.

The names are those of the tables: wrong, right, public; all of them without one.
Where one of the public ones is not installed their table stays as it is; public.py says how they are installed.
"""

import inspect
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from docs import public
from examination import right, right_plain, right_variants, wrong
from regard.atomic_write import write_atomically
from regard.errors import ConfigError
from regard.examination import Report, examine

PAGE = Path(__file__).parent / "examine.md"
BEGIN, END = "<!-- {}: written by python -m docs.examined -->", "<!-- end of {} -->"
BRIEF = 150  # characters of a piece of evidence
EQUAL = re.compile(
    r"\. The outputs equal .* computed this way to within (\S+);.*", re.DOTALL
)  # how well the formula fits that a finding names
LINK = re.compile(r"https://github\.com/[\w.-]+/([\w.-]+)/(?:issues|pull)/(\d+)")
WRONG = {
    "Masks": wrong.MASKS,
    "Scores and softmax": wrong.SOFTMAX,
    "Heads and roles": wrong.HEADS,
    "Training": wrong.TRAINING,
    "Kernels": wrong.KERNELS,
    "Positions": wrong.POSITIONS,
    "Beside rotary positions, biases, convolutions and routing": wrong.CALLS,
    "Sources, caches, and what follows the softmax": wrong.SOURCES,
    "Norms, differential and latent attention, softcaps and sinks": wrong.DESIGNS,
    "Longer inputs, values and outputs": wrong.LENGTHS,
    "Constants": wrong.CONSTANTS,
    "Order and places": wrong.ORDER,
    "Weights and values": wrong.WEIGHTS,
}
RIGHT = {
    "regard's own": right.list_own_layers,
    "the lectures' classes": right.list_lecture_classes,
    "torch's": right.list_torch_modules,
    "as people write them": right.list_handwritten_layers,
    "half and double precision": right.list_layers_in_other_dtypes,
    "designs that look wrong": right.list_designs,
    "variants, each in a way of its own": right.list_variants,
    "kernels, block by block": right.list_kernels,
    "compiled": right.list_compiled_layers,
    "Hugging Face, small and random": right.list_family_layers,
}


def main(names: list[str]) -> None:
    """Examines the layers of these tables, and writes what is between the marks of the page."""
    if unknown := sorted(set(names) - PARTS.keys()):
        raise SystemExit(f"expected names among {', '.join(PARTS)}; got {', '.join(unknown)}")
    missing = dict.fromkeys(one.package for one in public.PUBLIC if one.version is None)
    if missing and "public" in (names or PARTS):
        print(f"The table of public layers stays as it is: not installed are {', '.join(missing)}.", flush=True)

    def is_wanted(name: str) -> bool:
        return name in (names or PARTS) and not (missing and name == "public")

    written = {name: "\n".join(part()) for name, part in PARTS.items() if is_wanted(name)}
    page = PAGE.read_text(encoding="utf-8")
    for name, text in written.items():
        before, begin, rest = page.partition(BEGIN.format(name))
        _, end, after = rest.partition(END.format(name))
        page = f"{before}{begin}\n\n{text}\n\n{end}{after}"
    with write_atomically(PAGE) as (beside,):
        beside.write_text(page, encoding="utf-8")
    print(PAGE, flush=True)


def list_wrong_layers() -> Iterator[str]:
    """A row for each wrong layer, in groups, and how many were named."""
    named = kinds = 0
    found: list[str] = []
    for title, some in WRONG.items():
        found += ["", f"**{title}**", "", *format_head("layer", "the mistake", "found as", "evidence", "threads")]
        for one in some:
            report = examine(one.subject(), **one.settings())
            first = report.findings[0] if report.findings else None
            named, kinds = named + bool(first and first.kind in one.kinds), kinds + 1
            row = (first.kind, shorten(first.evidence)) if first else ("**not found**", "")
            found.append(format_line(f"`{one.name}`", one.mistake, *row, link_threads(one.make)))
            print(one.name, row[0], flush=True)
    yield f"{named} of {kinds} are named."
    yield from found


def list_right_layers() -> Iterator[str]:
    """A line for each sort of right layers: of how many something was found, and what they are."""
    for sort, some in RIGHT.items():
        layers, found = list(some()), []
        for one in layers:
            if examine(one.subject(), **one.arguments).findings:
                found.append(one.name)
            print(one.name, "found" if found[-1:] == [one.name] else "clean", flush=True)
        yield f"- **{sort}**, {len(layers)}, {', '.join(found) or 'nothing'} found: {'; '.join(map(describe_layer, layers))}."


def list_public_layers() -> Iterator[str]:
    """How many public layers there are and what was found, and a row for each finding, or one that nothing was found."""
    rows: list[str] = []
    verdicts: Counter[str] = Counter()
    for one in public.PUBLIC:
        try:
            report = one.report()
        except ConfigError as error:
            verdicts["ConfigError"] += 1
            results = [("ConfigError", shorten(str(error)))]
        else:
            verdict = "nothing found" if report else "with a finding" if report.findings else "inconclusive"
            verdicts[verdict] += 1
            clean = "nothing" if report else "nothing; inconclusive"
            results = [(finding.kind, shorten(finding.evidence)) for finding in report.findings] or [
                (clean, summarize_report(report))
            ]
        rows += [format_line(f"{one.package} {one.version}", one.says, *each) for each in results]
        print(one.package, one.says, results[0][0], flush=True)
    packages = len({one.package for one in public.PUBLIC})
    counts = ", ".join(f"{verdict} {count}" for verdict, count in verdicts.most_common())
    yield from (f"{len(public.PUBLIC)} layers and models of {packages} packages: {counts}.", "")
    yield from format_head("package", "layer, and what examine is told", "found", "evidence, or what cannot be told")
    yield from rows


def summarize_report(report: Report) -> str:
    """Of a clean report how much was checked, and what could not be determined."""
    unknown = [one.what for one in report.unknown]
    return f"{len(report.checked)} things checked" + (f"; cannot tell {shorten('; '.join(unknown))}" if unknown else "")


def describe_layer(one: right.Right) -> str:
    """A right layer's name; of one that is written in the collection also what it is."""
    if not isinstance(one.make, type) or one.make.__module__ not in (right_plain.__name__, right_variants.__name__):
        return one.name
    summary = inspect.getdoc(one.make).rstrip(".")
    return f"`{one.name}` ({summary[0].lower()}{summary[1:]})"


def link_threads(make: Any) -> str:
    """Links to the public threads that stand above a layer's code."""
    return ", ".join(f"[{found[1]}#{found[2]}]({found[0]})" for found in LINK.finditer(inspect.getsource(make)))


def shorten(text: str) -> str:
    """The beginning of a piece of evidence, cut between words; of a formula that was identified how well it fits."""
    text = EQUAL.sub(r" (fits to \1)", text)
    return text if len(text) <= BRIEF else text[:BRIEF].rpartition(" ")[0].rstrip(",;:.") + " …"


def format_head(*names: str) -> list[str]:
    """The first two lines of a table."""
    return [format_line(*names), "|" + " --- |" * len(names)]


def format_line(*cells: object) -> str:
    """A line of a table; what would end a cell is written as a letter."""
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


PARTS = {"wrong": list_wrong_layers, "right": list_right_layers, "public": list_public_layers}

if __name__ == "__main__":
    main(sys.argv[1:])
