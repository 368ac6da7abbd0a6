"""Summaries of an audit: mean, quantiles and extremes of what a policy keeps, and their table."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from regard.observe import text_table

LOW = 0.05  # the quantile of the rows that keep little
TITLES = {"keys": "keys", "recall": "recall", "low": "5 %", "least": "least", "kl": "KL", "error": "error"}


@dataclass(frozen=True)
class Summary:
    """What a policy keeps over the rows of a part, of all layers and heads.

    keys is the mean number of keys of a row; recall its mean, low its 5 % quantile, least its minimum; kl the mean in nats;
    error the mean relative error of the output.
    """

    policy: str
    part: str
    rows: int
    keys: float
    recall: float
    low: float
    least: float
    kl: float
    error: float


def summarize_part(policy: str, part: str, recall: Tensor, kl: Tensor, error: Tensor, kept: Tensor) -> Summary:
    """Summarize the rows of a part, each tensor (layer, b, h, q); of no rows all numbers are NaN."""
    if not recall.numel():
        return Summary(policy, part, 0, *[float("nan")] * 6)
    keys, mean, nats, relative = (float(x.double().mean()) for x in (kept, recall, kl, error))
    flat = recall.flatten()
    low = float(flat.kthvalue(1 + int(LOW * (len(flat) - 1))).values)
    return Summary(policy, part, len(flat), keys, mean, low, float(flat.min()), nats, relative)


def format_summaries(rows: Sequence[Summary], width: int) -> list[str]:
    """Return the summaries as aligned lines of at most `width` columns; numbers that it has no room for stand below."""
    lines = [[row.policy, *(format_cell(name, getattr(row, name)) for name in TITLES)] for row in rows]
    return text_table.align_in_blocks(["policy", *TITLES.values()], lines, width)


def format_positions(names: Sequence[str], edges: Sequence[int], means: Sequence[Sequence[float]], width: int) -> list[str]:
    """Return means of each policy over runs of queries, given their edges, as aligned lines of at most `width` columns.

    Runs that it has no room for stand below.
    """
    titles = ["recall at query", *(f"{first:,}-{stop - 1:,}" for first, stop in pairwise(edges))]
    lines = [[name, *(format_cell("recall", x) for x in line)] for name, line in zip(names, means, strict=True)]
    return text_table.align_in_blocks(titles, lines, width)


def format_cell(name: str, number: float) -> str:
    """Return a number of the table: keys with one digit after the point, recall as a share with four."""
    if number != number:
        return "-"
    if name == "keys":
        return f"{number:,.0f}"
    return f"{number:.4f}" if number < 10 else f"{number:.2f}"
