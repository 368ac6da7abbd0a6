"""What each word of a text did to a number: sums of attribution over all heads and queries."""

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.observe.attribution import Attribution


@dataclass(frozen=True)
class WordPull:
    """What the attention paid to a token did to a number: its pull over all heads, and the head with the largest part."""

    position: int
    word: str
    pull: float
    weight: float  # of the last token's row, the mean over all heads
    head: str
    head_pull: float


def sum_over_queries(attribution: Attribution, kind: str = "pull") -> Tensor:
    """Compute the sum over the queries of the first text, (layers, h, k), of a kind of attribution map."""
    maps = (attribution.map(layer, kind=kind) for layer in range(len(attribution.run.layers())))
    return torch.stack([one.column_sums()[0].double().cpu() for one in maps])


def find_largest_part(parts: Tensor) -> tuple[str, float]:
    """Return the head "layer.head" with the part of (layers, h) that is largest in size, and its part."""
    layer, head = divmod(int(parts.abs().argmax()), parts.shape[1])
    return f"{layer}.{head}", float(parts[layer, head])


def compute_pulls(attribution: Attribution, words: list[str]) -> list[WordPull]:
    """Return a row for each token of the first text, largest pull in size first."""
    layers = range(len(attribution.run.layers()))
    pulls = sum_over_queries(attribution)
    rows = [attribution.map(layer).weights[0, :, -1].double().mean(0).cpu() for layer in layers]
    weights, total = torch.stack(rows).mean(0), pulls.sum((0, 1))
    return [
        WordPull(
            position,
            words[position],
            float(total[position]),
            float(weights[position]),
            *find_largest_part(pulls[..., position]),
        )
        for position in total.abs().argsort(descending=True).tolist()
    ]
