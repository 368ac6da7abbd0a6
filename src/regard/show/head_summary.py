"""Summary of a recording as lines of text: the kinds of its heads, their table, and their strongest links.

Of a short text, every weight of every head too, as small grids of tenths: 7 is at least 0.7, a dot less than 0.1.
"""

import math
import textwrap
from collections.abc import Iterator

import torch
from rich.cells import cell_len
from rich.text import Text
from torch import Tensor

from regard.map import AttentionMap
from regard.observe import Recording
from regard.observe.classification.head_kinds import ACTIONS, RULES, TELLING_KINDS, UNCLEAR
from regard.observe.head_table import Head, Heads
from regard.observe.map_view import MapView
from regard.show.axis_words import AxisWords, get_axis_words
from regard.show.heat_map import wrap_sentence
from regard.show.number_format import format_count
from regard.show.shaded_text import BREAK, get_visible_text
from regard.show.terminal import get_heat_style, join_blocks, pack_blocks, truncate_end, truncate_start

MAX_PER_KIND = 3  # heads of a kind in a short table
RANKING_SCORES = {**RULES, UNCLEAR: "entropy"}  # scores that rank a kind of another name
KIND_ORDER = (*TELLING_KINDS, "local", "broad", UNCLEAR)
UNINFORMATIVE_KINDS = ("first token", "itself", "broad")  # kinds whose strongest link adds nothing
KIND_MEANINGS = {**ACTIONS, UNCLEAR: "no score is surely above its threshold, or several are"}
WEIGHT_TOLERANCE = 1e-5  # difference below which two weights are equal
WORDS_BEFORE = 4  # words shown before the source of a link
MAX_TOKENS = 16  # maximum tokens of a text whose heads are drawn
LABEL_CELLS = 6  # maximum cells of a row label


def list_kinds(heads: Heads) -> list[str]:
    """List the kinds of some heads, the most telling first; those that KIND_ORDER does not name come before all others."""
    kinds = dict.fromkeys(row.kind for row in heads)
    return sorted(kinds, key=lambda kind: KIND_ORDER.index(kind) if kind in KIND_ORDER else -1)


def render_kinds(heads: Heads, width: int) -> Iterator[Text]:
    """Generate lines with the number of heads of each kind and the meaning of the kind."""
    counts = {kind: len(heads.select_kind(kind)) for kind in list_kinds(heads)}
    number = max((len(str(count)) for count in counts.values()), default=0)
    kind_width = max((len(kind) for kind in counts), default=0)
    for kind, count in counts.items():
        start = f"{count:>{number}} {kind:<{kind_width}}  "
        for sentence in textwrap.wrap(KIND_MEANINGS.get(kind, ""), max(width - len(start), 8)) or [""]:
            yield Text.assemble(start, (sentence, "dim"))
            start = " " * len(start)


def select_clearest(heads: Heads) -> Heads:
    """Select the three clearest heads of each kind, the most telling kind first."""
    best = [heads.select_kind(kind).sort_by(RANKING_SCORES.get(kind, kind)).rows[:MAX_PER_KIND] for kind in list_kinds(heads)]
    return Heads(tuple(row for rows in best for row in rows), heads.notes)


def render_table(heads: Heads, width: int, show_all: bool, by: str | None = None) -> Iterator[Text]:
    """Generate the table of all heads, or of the clearest of each kind, with as many scores as fit, `by` among them."""
    shown = heads if show_all else select_clearest(heads)
    (first, *rest), hidden = shown.format_lines(width, by)
    yield Text(first, style="dim")
    yield from map(Text, rest)
    notes = [f"the clearest of {format_count(len(heads), 'head')}; --all shows all"] if len(shown) < len(heads) else []
    notes += ["--help explains the columns"] if notes else []
    notes += [f"a wider window or --csv shows {len(hidden)} more scores"] if hidden else []
    yield from wrap_sentence("; ".join(notes), width) if notes else ()
    yield from (line for note in heads.notes for line in wrap_sentence(note, width))


def render_sentences(heads: Heads, width: int) -> Iterator[Text]:
    """Generate a line for each head that says what it does and how sure that is; longer ones take more lines."""
    if not len(heads):
        return
    yield from wrap_sentence("what they do: the score, its 95 % interval, and on how many queries", width)
    for row in heads:
        start = f"{row.layer}.{row.head}".ljust(6)
        for part in textwrap.wrap(row.sentence, max(width - len(start), 8)):
            yield Text.assemble((start, "bold"), part)
            start = " " * len(start)


def render_links(recording: Recording, heads: Heads, width: int, kind: str = "self") -> Iterator[Text]:
    """Generate the strongest link of the clearest heads: from which word, after which words, to which, and how strong."""
    size = recording.map(0, kind=kind).shape[2:]
    words = get_axis_words(recording, 0, kind, None, 0, size) if recording.tokens else None
    telling = [row for row in select_clearest(heads) if row.kind not in UNINFORMATIVE_KINDS]
    if telling:
        named = "a token with those before it → the token it attends to" if words else "a query → the key it attends to most"
        yield from wrap_sentence(f"strongest links: {named}", width)
    for row in telling:
        query, key, weight = find_strongest_link(recording.map(row.layer, row.head, kind), kind)
        yield render_link(row, words, query, key, weight, width, kind)


def find_strongest_link(head: AttentionMap, kind: str = "self") -> tuple[int, int, float]:
    """Return query, key and weight of the largest weight of a head.

    In self attention, queries whose largest weight is on the first token or on themselves are skipped, unless all are; then
    the first token, which may see itself alone. Those whose weights are NaN, or that are padding, come last.
    """
    look = MapView(head, own=kind == "self")
    largest = look.statistics.largest[0, 0].nan_to_num(-1).where(look.is_counted[0, 0], -1)
    if kind == "cross":  # the first word of another text is not special
        query = int(largest.argmax())
    else:
        is_trivial = largest - torch.maximum(look.first_token_weight[0, 0], look.diagonal(0)[0, 0]) < WEIGHT_TOLERANCE
        is_first = look.positions[0] == look.first_token_indices[0]
        query = int((largest - 2.0 * is_trivial - 2.0 * is_first - 8.0 * (largest < 0)).argmax())
    row = head[0, 0, query]
    return query, int(row.argmax()), float(row.max())


def render_link(
    row: Head, words: AxisWords | None, query: int, key: int, weight: float, width: int, kind: str = "self"
) -> Text:
    """Format a link as a line: the head, its weight, and its words."""
    start = Text.assemble((f"{row.layer}.{row.head}".ljust(6), "bold"), f"{weight:.2f}  ")
    if words is None:
        return Text.assemble(start, f"query {query} → key {key}")
    room = width - len(start) - 4
    asking, answering = words
    before = "".join(asking[max(query - WORDS_BEFORE, 0) : query]).replace("\n", BREAK).lstrip(" ")
    source, target = (truncate_end(get_visible_text(word), room // 4) for word in (asking[query], answering[key]))
    source = " " * (asking[query].startswith(" ") and bool(before)) + source
    place = f" {query - key} back" if query != key and kind == "self" else ""
    context = truncate_start(before, max(room - cell_len(source) - cell_len(target) - len(place) - 4, 0))
    return Text.assemble(start, (context, "dim"), (source, "bold"), " → ", (target, "bold"), (place, "dim"))


def render_grids(recording: Recording, heads: Heads, width: int, colours: str | None, kind: str = "self") -> Iterator[Text]:
    """Generate the lines of all grids, side by side where they fit; none for a text of more than 16 tokens or without words."""
    size = recording.map(0, kind=kind).shape[2:]
    if not recording.tokens or max(len(recording.tokens), *size) > MAX_TOKENS:
        return
    asking, answering = get_axis_words(recording, 0, kind, None, 0, size)
    legend = "weights in tenths: rows are queries, columns are keys"
    yield from wrap_sentence(legend + (f": {' '.join(map(get_visible_text, answering))}" if kind == "cross" else ""), width)
    words = [truncate_end(get_visible_text(word), LABEL_CELLS) for word in asking]
    blocks = [
        render_grid(
            f"{row.layer}.{row.head} {row.kind}", words, recording.map(row.layer, row.head, kind).dense()[0, 0], colours
        )
        for row in heads
    ]
    for number, row in enumerate(pack_blocks(blocks, width)):
        if number:
            yield Text()
        yield from join_blocks(row)


def render_grid(title: str, words: list[str], weights: Tensor, colours: str | None) -> list[Text]:
    """Format the weights of a head; the later keys are left empty where no query attends to them."""
    side = max(map(cell_len, words)) + 1
    lines = [Text(title, style="bold")]
    later = weights.nan_to_num(0).triu(1)
    causal = len(weights) == weights.shape[1] and not bool(later.any())  # no query attends to a later key
    for query, word in enumerate(words):
        line = Text(word + " " * (side - cell_len(word)))
        for weight in weights[query, : query + 1 if causal else None].tolist():
            tenth = "?" if math.isnan(weight) else "·123456789"[min(int(10 * weight + 1e-6), 9)]
            line.append(f" {tenth}", style=get_heat_style(weight, colours))
        lines.append(line)
    return lines
