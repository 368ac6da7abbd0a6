"""LogitLens: what the output of each head of a layer adds to the logit of every token of the vocabulary."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from regard.mechanism.arguments import check_count
from regard.observe.recorded_runs.words import MARKS
from regard.observe.text_table import align_columns, count_fitting_columns, format_token

SHOWN = 5  # tokens of each head that are printed


@dataclass(frozen=True, eq=False)
class LogitLens:
    """What the output of each head of a layer adds to the logit of every token, by the direct path.

    logits (b, h, n, vocabulary) for n queries, or (b, h, vocabulary) for a single query. A number that a head adds to
    all tokens alike changes no probability. words returns the text of tokens, for printing; without it they are ids.
    """

    layer: int
    queries: tuple[int, ...]
    logits: Tensor
    words: Callable[[list[int]], Sequence[str]] | None = None

    def top(self, n: int = SHOWN) -> tuple[Tensor, Tensor]:
        """Return the n tokens to which each head adds most: what it adds, largest first, and the ids, both (b, h, ..., n)."""
        return tuple(self.logits.topk(check_count("n", n, most=self.logits.shape[-1]), -1))  # type: ignore[return-value]

    def __str__(self) -> str:
        shown = min(SHOWN, self.logits.shape[-1])
        values, tokens = (x[0].reshape(-1, len(self.queries), shown) for x in self.top(shown))  # (h, n, shown)
        titles, rows = ("head", "query", "adds most to", *[""] * (shown - 1)), []
        for head in range(len(values)):
            for n, query in enumerate(self.queries):
                ids = tokens[head, n].tolist()
                words = [format_token(str(word).strip(MARKS)) for word in (ids if self.words is None else self.words(ids))]
                added = [f"{value:+.2f} {word}" for value, word in zip(values[head, n].tolist(), words, strict=True)]
                rows.append((f"{self.layer}.{head}", str(query), *added))
        count = count_fitting_columns(titles, rows)
        return "\n".join(align_columns(titles[:count], [row[:count] for row in rows], ("head", *titles[2:])))
