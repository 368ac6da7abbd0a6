"""docs/lineage.md: what is between its marks is written here, of results.json and alignments.json.

Runs that are not done are named there, and left out of all else.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from docs.pictures import lineage as pictures

from recipes.lineage.alignments import FRENCH, JUMPED, LECTURES, WORDS
from recipes.lineage.measure import ALIGNMENTS, RESULTS
from recipes.lineage.runs import MODELS, runs
from recipes.lineage.table import within
from regard.atomic_write import write_atomically

PAGE = Path(__file__).parents[2] / "docs" / "lineage.md"
BEGIN, END = "<!-- {}: written by python -m recipes.lineage --measure -->", "<!-- end of {} -->"
TOLD = 3  # words that are looked at, of a row
SCORES = ("BLEU_1", "BLEU_4", "chrF_4")
BOTH_WAYS = ("forward", "backward")
TABLED = {"first": BOTH_WAYS, "second": BOTH_WAYS, "middle": ("both",), "last": BOTH_WAYS}  # the states told of each word
EVERY = 2  # of so many bins of lengths one is in the table, the last among them; the picture has all
Row = Mapping[str, Any]
Rows = Sequence[Row]
Seen = Mapping[str, Any]
Cell = tuple[Callable[[Row], float], str]
GROWN: dict[str, Cell] = {
    "BLEU, together": (lambda one: one["together"]["score"], ".1f"),
    "BLEU, apart": (lambda one: one["apart"]["score"], ".1f"),
    "words written, of people's": (lambda one: one["written"], ".0%"),
}


def write() -> None:
    """The tables of the page, then its pictures."""
    rows, seen = (json.loads(path.read_text(encoding="utf-8")) for path in (RESULTS, ALIGNMENTS))
    with write_atomically(PAGE) as (beside,):
        beside.write_text(filled(PAGE.read_text(encoding="utf-8"), rows, seen), encoding="utf-8")
    pictures.main()
    print(PAGE, flush=True)


def filled(page: str, rows: Rows, seen: Seen) -> str:
    """The page with all that is between marks written anew."""
    for name, part in PARTS.items():
        before, begin, rest = page.partition(BEGIN.format(name))
        _, end, after = rest.partition(END.format(name))
        page = f"{before}{begin}\n\n" + "\n".join(part(rows, seen)) + f"\n\n{end}{after}"
    return page


def scores(rows: Rows, seen: Seen) -> Iterator[str]:
    """BLEU and chrF of every run, their means over seeds, the signatures, and the runs that are not done."""
    yield from head("trained on", "model", "seed", "parameters", "BLEU, greedy", "BLEU, 4 beams", "chrF, 4 beams", "training")
    for some in grouped(rows):
        for row in some:
            cells = [trained_on(row), pictures.NAMES[row["model"]], row["seed"], f"{row['parameters']:,}"]
            yield line(*cells, *(within(row[name]) for name in SCORES), f"{row['training_seconds'] / 60:.0f} min")
        if len(some) > 1:
            means = [f"**{fmean(row[name]['score'] for row in some):.1f}**" for name in SCORES]
            yield line(trained_on(some[0]), pictures.NAMES[some[0]["model"]], f"mean of {len(some)}", "", *means, "")
    yield ""
    sizes = dict.fromkeys((row["pairs"], row["sentences"]) for row in rows)
    yield (
        "Test sentences: "
        + "; ".join(f"{count:,} {pictures.SETS[pairs]}" for pairs, count in sizes).replace("trained on", "of models trained on")
        + ". ± is where 95 % of 1,000 bootstrap draws of them lie. Signatures:"
    )
    yield ""
    yield from (f"- `{one}`" for one in sorted({row[name]["signature"] for row in rows for name in SCORES}))
    missing = [one.name for one in runs() if one.name not in {row["run"] for row in rows}]
    if missing:
        yield ""
        yield f"Not done yet, and so in no table and no picture: {', '.join(f'`{name}`' for name in missing)}."


def lengths(rows: Rows, seen: Seen) -> Iterator[str]:
    """The pictures, and the numbers of the captions that were joined."""
    for pairs in pictures.SETS:
        if any(row["pairs"] == pairs for row in rows):
            says = f"BLEU against the length of the source, models {pictures.SETS[pairs]}"
            yield f"![{says}: sentences of the test part, and captions joined](pictures/lineage-length-{pairs}.svg)"
            yield ""
    some = [(one["captions"], one["most_words"]) for one in rows[0]["together"]]
    counts = [f"{count}, at most {most} words" if most else str(count) for count, most in some]
    yield from head("trained on", "model", "captions in a sentence", *counts)
    for some in grouped(rows):
        steps = list(zip(*(row["together"] for row in some), strict=True))
        for says, cell in GROWN.items():
            yield line(trained_on(some[0]), pictures.NAMES[some[0]["model"]], says, *(mean_of(cell, step) for step in steps))


def mean_of(cell: Cell, step: Rows) -> str:
    """A number of one or several seeds, as it is written."""
    value, form = cell
    return format(fmean(map(value, step)), form)


def alignments(rows: Rows, seen: Seen) -> Iterator[str]:
    """The pictures, how sure each layer is of twins, what is looked at for "jumped", and what each model says."""
    for pairs in pictures.SETS:
        if any(f"{pairs}-{name}-0" in seen for name in ("additive", "transformer")):
            says = f"Soft alignments of four captions, models {pictures.SETS[pairs]}"
            says = f"{says}: the weight goes down the diagonal, and crosses where words change places"
            yield f"![{says}](pictures/lineage-alignment-{pairs}.png)"
            yield ""
    looking = [row for row in rows if "alignments" in seen[row["run"]]]
    yield from head("trained on", "model", "seed", "twins", "weight on the twin, layer by layer")
    for row in looking:
        one = seen[row["run"]]
        shares = ", ".join(f"**{share:.2f}**" if n == one["layer"] else f"{share:.2f}" for n, share in enumerate(one["layers"]))
        yield line(trained_on(row), pictures.NAMES[row["model"]], row["seed"], one["twins"], shares)


def jumped(rows: Rows, seen: Seen) -> Iterator[str]:
    """What the word for "jumped" looks at, and the models' own words for the lectures' sentence."""
    for pairs in pictures.SETS:
        if any(f"{pairs}-{name}-0" in seen for name in ("additive", "transformer")):
            says = f"What each word of the French sentence looks at, models {pictures.SETS[pairs]}"
            yield f"![{says}](pictures/lineage-jumped-{pairs}.svg)"
            yield ""
    yield from head("trained on", "model", "seed", *(f"“{word}” looks at" for word in WORDS), f"on “{JUMPED}”, together")
    for row in rows:
        if "alignments" in seen[row["run"]]:
            found = seen[row["run"]]["alignments"][-1]
            last = len(found["target"]) - 1 - found["target"][::-1].index(WORDS[-1])
            weights = [found["weights"][last - 1], found["weights"][last]]
            onto = fmean(one[found["source"].index(JUMPED)] for one in weights)
            cells = [looked(one, found["source"]) for one in weights]
            yield line(trained_on(row), pictures.NAMES[row["model"]], row["seed"], *cells, f"{onto:.2f}")
    yield ""
    yield f"*{LECTURES}* — in people's words *{FRENCH}* — is, in the models' own (4 beams):"
    yield ""
    yield from head("trained on", "model", "seed", "says")
    for row in rows:
        yield line(trained_on(row), pictures.NAMES[row["model"]], row["seed"], seen[row["run"]]["says"])


def looked(weights: Sequence[float], words: Sequence[str]) -> str:
    """The words that have most of a row, and how much."""
    best = sorted(range(len(words)), key=lambda n: -weights[n])[:TOLD]
    return ", ".join(f"`{words[n]}` {weights[n]:.2f}" for n in best)


def probes(rows: Rows, seen: Seen) -> Iterator[str]:
    """The pictures, and what is read of each place from each state, in short and in long sentences."""
    probed = [row for row in rows if row["probe"] and row["seed"] == 0 and not row["most_words"]]
    for pairs in dict.fromkeys(row["pairs"] for row in probed):
        says = f"Share of words that a linear probe reads from the last states, encoders {pictures.SETS[pairs]}"
        yield f"![{says}, against the length of the sentence](pictures/lineage-probe-{pairs}.svg)"
        yield ""
    bins = list(dict.fromkeys((one["above"], one["upto"]) for row in probed for one in row["probe"]))[::-EVERY][::-1]
    named = [
        f"up to {upto}" if not above else f"over {above}" if upto >= 1000 else f"{above + 1} to {upto}" for above, upto in bins
    ]
    yield from head("trained on", "model", "word", *named)
    for row in probed:
        for word, states in TABLED.items():
            yield line(trained_on(row), pictures.NAMES[row["model"]], word, *(read(row, word, states, one) for one, _ in bins))


def read(row: Row, word: str, states: Sequence[str], above: int) -> str:
    """The share that is read from each state, and what naming the most frequent word would get."""
    some = [one for one in row["probe"] if (one["place"], one["above"]) == (word, above)]
    own = [one for state in states for one in some if one["state"] == state]
    shares = ", ".join(format(one["share"], ".2f") for one in own)
    return f"{shares} ({own[0]['most']:.2f})" if own else ""


def grouped(rows: Rows) -> list[Rows]:
    """Runs that differ in their seed alone, side by side."""
    keys = [(row["pairs"], row["most_words"], MODELS.index(row["model"])) for row in rows]
    return [[row for row, one in zip(rows, keys, strict=True) if one == key] for key in dict.fromkeys(keys)]


def trained_on(row: Row) -> str:
    """The pairs a run has learned from."""
    words = f", at most {row['most_words']} words" if row["most_words"] else ""
    return pictures.SETS[row["pairs"]].removeprefix("trained on ") + words


def head(*names: str) -> list[str]:
    """The first two lines of a table."""
    return [line(*names), "|" + " --- |" * len(names)]


def line(*cells: object) -> str:
    """A line of a table; what would end a cell is written as a letter."""
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


PARTS: dict[str, Callable[[Rows, Seen], Iterator[str]]] = {
    "scores": scores,
    "lengths": lengths,
    "alignments": alignments,
    "jumped": jumped,
    "probes": probes,
}
