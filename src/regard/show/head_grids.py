"""Every weight of every head of a short text, as small grids of tenths: 7 is at least 0.7, a dot less than 0.1."""

from collections.abc import Iterator

from rich.cells import cell_len
from rich.text import Text
from torch import Tensor

from regard.observe import Recording
from regard.observe.head_kinds import Heads
from regard.show.axis_words import get_axis_words
from regard.show.heat_map import wrap_sentence
from regard.show.shaded_text import get_visible_text
from regard.show.terminal import get_heat_style, join_blocks, pack_blocks, truncate_end

MAX_TOKENS = 16  # maximum tokens of a text whose heads are drawn
LABEL_CELLS = 6  # maximum cells of a row label


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
    causal = len(weights) == weights.shape[1] and not bool(weights.triu(1).any())  # no query attends to a later key
    for query, word in enumerate(words):
        line = Text(word + " " * (side - cell_len(word)))
        for weight in weights[query, : query + 1 if causal else None].tolist():
            tenth = min(int(10 * weight + 1e-6), 9)
            line.append(f" {tenth}" if tenth else " ·", style=get_heat_style(weight, colours))
        lines.append(line)
    return lines
