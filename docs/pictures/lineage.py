"""The pictures of docs/lineage.md, from what recipes/lineage has measured: `python -m docs.pictures.lineage`. Nothing is run.

Runs that are not done yet are not drawn.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib as mpl
import torch
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullLocator
from recipes.lineage.alignments import CAPTIONS
from recipes.lineage.measure import ALIGNMENTS, RESULTS
from recipes.lineage.runs import MODELS, SHORT

from regard.show.figure import FAINT, INKS, MARKERS, TEXT_SIZE, LinearScale, Picture, draw_sheet, make_panel, style_axes

FOLDER = Path(__file__).parent
COSTS = FOLDER.parents[1] / "benchmarks" / "results.json"
Row = Mapping[str, Any]
COLOURS = dict(zip(MODELS, (INKS[1], INKS[2], INKS[0]), strict=True))
MARKS = dict(zip(MODELS, MARKERS, strict=False))
NAMES = {"transformer": "Transformer", "additive": "additive attention", "plain": "without attention"}
SETS = {"multi30k": "trained on Multi30k", "joined": "trained on Multi30k and Tatoeba"}
KINDS = {"captions": "captions of the test part", "others": "Tatoeba's sentences of the test part"}
PROBED = (("first", "forward"), ("second", "forward"), ("middle", "both"), ("last", "backward"))
READ = {"forward": "read from left to right", "backward": "read from right to left", "both": "both directions"}


def main() -> None:
    """Draws those for which there are numbers."""
    mpl.rcParams["svg.hashsalt"] = "regard"  # the same names in the file each time
    rows, seen = (json.loads(path.read_text(encoding="utf-8")) for path in (RESULTS, ALIGNMENTS))
    measured = json.loads(COSTS.read_text(encoding="utf-8")).values()
    costs = next((tables for tables in measured if "lineage" in tables), {})
    for pairs in SETS:
        own = [row for row in rows if row["pairs"] == pairs]
        if own:
            save(length(own), f"lineage-length-{pairs}.svg")
        if any(row["probe"] for row in own):
            save(probe(own), f"lineage-probe-{pairs}.svg")
        looking = {name: seen[run] for name in ("additive", "transformer") if (run := f"{pairs}-{name}-0") in seen}
        if looking:
            save(alignments(looking, range(len(CAPTIONS))), f"lineage-alignment-{pairs}.png")  # a fifth of the size of an SVG
            save(alignments(looking, [len(CAPTIONS)]), f"lineage-jumped-{pairs}.svg")
    if "lineage" in costs:
        save(cost(costs["lineage"]), "lineage-cost.svg")


def length(rows: Sequence[Row]) -> Picture:
    """BLEU against the length of a sentence: of the test part, and of captions joined. Dashed: learned from short sentences."""
    kinds = dict.fromkeys(kind for row in rows for kind in row["natural"])
    figure = Picture(figsize=(4.0 + 3.4 * len(kinds), 4.1), layout="constrained")
    *lefts, right = figure.subplots(1, len(kinds) + 1, sharey=True)
    names = list(dict.fromkeys((row["model"], row["most_words"]) for row in rows))
    for model, most in names:
        own = [row for row in rows if (row["model"], row["most_words"]) == (model, most)]
        for left, kind in zip(lefts, kinds, strict=True):
            bins = group_by_length(own, kind)
            draw(left, [(above + 1 + upto) / 2 for above, upto in bins], list(bins.values()), model, most)
        steps = list(zip(*(join_measurements(row) for row in own), strict=True))
        x = [one[0]["words"] for one in steps]
        draw(right, x, [[one["together"] for one in step] for step in steps], model, most)
        if not most:
            apart = [fmean(one["apart"]["score"] for one in step) for step in steps]
            right.plot(x, apart, color=COLOURS[model], linestyle=":", linewidth=1.2)
    for left, kind in zip(lefts, kinds, strict=True):
        style_axes(left, KINDS[kind], ("words of the source; below, sentences", "BLEU" if left is lefts[0] else ""))
        sizes = {edges: some[0]["sentences"] for edges, some in group_by_length(rows, kind).items()}
        left.set_xticks(
            [(above + 1 + upto) / 2 for above, upto in sizes],
            [f"{above + 1}–{upto}\n{count}" for (above, upto), count in sizes.items()],
        )
        left.set_ylim(bottom=0)
    style_axes(right, "captions joined by “and”, one to five", ("words of the source; below, sentences", ""))
    together = join_measurements(rows[0])
    right.set_xticks([one["words"] for one in together], [f"{one['words']:.0f}\n{one['sentences']}" for one in together])
    legend(figure, names)
    return figure


def join_measurements(row: Row) -> list[Row]:
    """What was measured of captions joined, whatever their length."""
    return [one for one in row["together"] if not one["most_words"]]


def group_by_length(rows: Sequence[Row], kind: str) -> dict[tuple[int, int], list[Row]]:
    """The scores of each bin of lengths, in order: one of each row that has it."""
    found: dict[tuple[int, int], list[Row]] = {}
    for one in sorted((one for row in rows for one in row["natural"].get(kind, ())), key=lambda one: one["above"]):
        found.setdefault((one["above"], one["upto"]), []).append(one)
    return found


def draw(axes: Axes, x: Sequence[float], bins: Sequence[Sequence[Row]], model: str, most: int) -> None:
    """The mean score of each bin over seeds, and a bar for the mean of their intervals."""
    y = [fmean(one["score"] for one in some) for some in bins]
    within = [fmean(one["interval"] or 0.0 for one in some) for some in bins]
    shift = (list(COLOURS).index(model) - 1) * 0.25 + 0.1 * bool(most)  # bars beside, not over, each other
    look: dict[str, Any] = {"color": COLOURS[model], "marker": MARKS[model], "markersize": 4.5, "capsize": 2, "elinewidth": 0.9}
    axes.errorbar([at + shift for at in x], y, within, linestyle="--" if most else "-", linewidth=1.6, **look)


def legend(figure: Picture, names: Sequence[tuple[str, int]]) -> None:
    """What the lines are, below both panels."""
    lines: list[Line2D] = []
    for model in COLOURS:
        if any(model == one for one, _ in names):
            lines.append(Line2D([], [], color=COLOURS[model], marker=MARKS[model], markersize=4.5, label=NAMES[model]))
    if any(most for _, most in names):
        lines.append(Line2D([], [], color=FAINT, linestyle="--", label=f"learned from at most {SHORT} words"))
    lines.append(Line2D([], [], color=FAINT, linestyle=":", label="the same captions, translated one at a time"))
    figure.legend(handles=lines, loc="outside lower center", frameon=False, fontsize=TEXT_SIZE, ncols=3)


def alignments(seen: Mapping[str, Row], numbers: Sequence[int]) -> Picture:
    """What each word of a translation looked at: the source along the top, the translation down the side, a model a column."""
    panels = []
    for number in numbers:
        for name, row in seen.items():
            one = row["alignments"][number]
            title = f"{NAMES[name]}, layer {row['layer'] + 1} of {len(row['layers'])}" if name == "transformer" else NAMES[name]
            look = {"title": title, "scale": LinearScale(0, 1), "room": 3.0 if len(numbers) == 1 else 2.0}
            panels.append(make_panel(torch.tensor(one["weights"]), one["target"], one["source"], **look))
    return draw_sheet(panels, across=len(seen), shared=True)


def probe(rows: Sequence[Row]) -> Picture:
    """The share of held-out sentences whose word a probe reads from the encoder's last states, against their length."""
    figure = Picture(figsize=(9.6, 5.6), layout="constrained")
    panels = figure.subplots(2, 2, sharex=True, sharey=True).flatten()
    first = [row for row in rows if row["probe"] and not row["most_words"] and row["seed"] == 0]
    for n, (axes, (place, state)) in enumerate(zip(panels, PROBED, strict=True)):
        names = ("words of the sentence" if n > 1 else "", "share that is read" if n % 2 == 0 else "")
        style_axes(axes, f"{place} word, {READ[state]}", names)
        for row in first:
            own = [one for one in row["probe"] if (one["place"], one["state"]) == (place, state)]
            x, y = [one["words"] for one in own], [one["share"] for one in own]
            low, high = zip(*(one["within"] for one in own), strict=True)
            axes.fill_between(x, low, high, color=COLOURS[row["model"]], alpha=0.15, linewidth=0)
            axes.plot(x, y, color=COLOURS[row["model"]], marker=MARKS[row["model"]], markersize=4.5, linewidth=1.6)
        axes.plot(x, [one["most"] for one in own], color=FAINT, linestyle=":", linewidth=1.4)
        axes.set_ylim(0, 1.03)
    lines = [
        Line2D([], [], color=COLOURS[row["model"]], marker=MARKS[row["model"]], markersize=4.5, label=NAMES[row["model"]])
        for row in first
    ]
    lines.append(Line2D([], [], color=FAINT, linestyle=":", label="always the most frequent word"))
    figure.legend(handles=lines, loc="outside lower center", frameon=False, fontsize=TEXT_SIZE, ncols=3)
    return figure


def cost(result: Row) -> Picture:
    """Milliseconds to read a sentence and to write its translation, and the memory that both take, against the length."""
    figure = Picture(figsize=(9.6, 3.4), layout="constrained")
    panels, columns = figure.subplots(1, 3), result["columns"]
    x = [row[0] for row in result["rows"]]
    for axes, way, title in zip(
        panels, ("read", "write", "MiB"), ("ms to read", "ms to write as many", "MiB for both"), strict=True
    ):
        style_axes(axes, title, ("tokens", ""))
        for name in MODELS:
            y = [row[columns.index(f"{way}: {name}")] for row in result["rows"]]
            axes.plot(x, y, color=COLOURS[name], marker=MARKS[name], markersize=4.5, linewidth=1.6)
        axes.set(xscale="log", yscale="log")
        axes.set_xticks(x, [f"{count}" for count in x])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    lines = [Line2D([], [], color=COLOURS[name], marker=MARKS[name], markersize=4.5, label=NAMES[name]) for name in MODELS]
    figure.legend(handles=lines, loc="outside lower center", frameon=False, fontsize=TEXT_SIZE, ncols=3)
    return figure


def save(picture: Picture, name: str) -> None:
    """Writes a figure."""
    metadata = {"Date": None} if name.endswith(".svg") else {"Software": None}
    picture.savefig(FOLDER / name, metadata=metadata, dpi=110)


if __name__ == "__main__":
    main()
