"""What each word looks at in an image, in the terminal: a table of words, the weight on the image, and the largest patch."""

from collections.abc import Iterator, Sequence

from rich.text import Text

from regard.observe.text_table import align_columns
from regard.show.heat_map import wrap_sentence
from regard.show.patch_weights import PatchWeights
from regard.show.terminal import truncate_end
from regard.show.terminal_colors import TerminalArea

TITLES = "token", "word", "image", "most at", "weight"
WORD = 1  # its column
TOKEN = ", token "  # in the name of a query, before its number
MAX_LINES = 40  # of the table: the last words


def render_words(shown: Sequence[PatchWeights], window: TerminalArea) -> Iterator[Text]:
    """Generate a line for each word: its weight on all patches of the image, and the patch that has most of it."""
    yield from wrap_sentence(f"What each word looks at in the image, {shown[0].what}", window.width, "bold")
    rows = []
    for one in shown[-MAX_LINES:]:
        seen = one.values.nan_to_num(0.0)
        row, column = divmod(int(seen.argmax()), seen.shape[1])
        word, _, number = one.query.rpartition(TOKEN)
        rows.append([number, word, f"{float(seen.sum()):.2f}", f"patch {row},{column}", f"{float(seen.max()):.3f}"])
    beside = sum(max(map(len, column)) + 2 for n, column in enumerate(zip(TITLES, *rows, strict=True)) if n != WORD)
    for cells in rows:
        cells[WORD] = truncate_end(cells[WORD], max(window.width - beside, len(TITLES[WORD])))
    yield from (Text(line) for line in align_columns(TITLES, rows, (TITLES[WORD],)))
    if len(shown) > MAX_LINES:
        yield from wrap_sentence(f"{len(shown) - MAX_LINES:,} words before these: --query shows one.", window.width, "dim")
