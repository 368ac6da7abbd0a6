"""Attention rollout as a picture: how much of each token reaches a query, layer by layer."""

import torch

from regard.observe import Recording
from regard.observe.recorded_runs.token_mixers import list_token_mixers
from regard.observe.rollout import rollout as rolled
from regard.show.axis_words import get_axis_words
from regard.show.color_scale import Log, Signed
from regard.show.figure import Picture, draw_sheet, format_word, make_panel
from regard.show.head_figure import MAX_WORDS
from regard.show.page.implicit_pictures import SIGNS

MAX_INCHES = 5.6  # inches
MIN_SHARE = 1e-3  # share that has the palest color


def draw_rollout(
    recording: Recording,
    query: int = -1,
    *,
    kind: str | None = None,
    part: str | None = None,
    row: int = 0,
    residual: float = 0.5,
    title: str | None = None,
) -> Picture:
    """Draw how much each token counts for one query after each layer, as computed by regard.rollout.

    A row is a layer, the first one below the words; kind is that of regard.rollout. A column is a token, or in a long text
    several tokens, whose shares are added. Colors are logarithmic, or of two hues where layers without a softmax make entries
    negative. Raises ConfigError if no layer was recorded.
    """
    mixers = list_token_mixers(recording.last, kind, part)
    count = len(mixers)
    settings = {"kind": kind, "part": part, "residual": residual}
    whole = rolled(recording, [query], **settings)  # type: ignore[arg-type]
    parts = [rolled(recording, [query], layers=range(n + 1), **settings) for n in range(count - 1)]  # type: ignore[arg-type]
    found = torch.stack([one[row, 0] for one in (*parts, whole)])
    words = get_axis_words(recording, mixers[0][1], mixers[0][0], part, row, (found.shape[1],) * 2)[1]
    place = query % len(words)
    name = f"rollout to “{format_word(words[place].strip(' ') or words[place])}”, token {place:,}" if title is None else title
    over = "token"
    if len(words) > MAX_WORDS:
        (found, words), over = sum_bins(found), "tokens from this one on"
    layers = [f"layer {n}" for n in range(count)]
    is_signed = bool((found < 0).any())
    scale = Signed() if is_signed else Log(MIN_SHARE, 1)
    panel = make_panel(found, layers, words, title=name, names=("after", over), scale=scale, room=MAX_INCHES)
    return draw_sheet([panel], note=SIGNS if is_signed else "")


def sum_bins(found: torch.Tensor) -> tuple[torch.Tensor, list[str]]:
    """Sum the columns in bins, each named by its first token."""
    bins = torch.arange(found.shape[1], device=found.device) * MAX_WORDS // found.shape[1]
    total = found.new_zeros(found.shape[0], MAX_WORDS).index_add_(1, bins, found)
    return total, [f"{int((bins < n).sum()):,}" for n in range(MAX_WORDS)]
