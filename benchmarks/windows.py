"""What looking at many small windows costs, as those of Swin: the matrices, an overview and the scores of heads."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.tables import Table
from benchmarks.timing import time_contenders
from regard import AttentionMap, heads
from regard.observe import Recording, record

TITLE = "windows of 49 tokens and 4 heads of width 32, float32: a direct softmax against maps"
COLUMNS = ["windows", "direct ms", "dense ms", "ratio", "overview ms", "ratio", "heads ms", "ratio"]
WINDOWS, HEADS, TOKENS, WIDTH = (16, 64, 256, 1024), 4, 49, 32


class Windows(nn.Module):
    """Attention within windows x (windows, heads, tokens, width)."""

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)


def run(peak: dict[torch.dtype, float]) -> Table:
    """Milliseconds of q kᵀ and its softmax, of the same matrices from a map, of its overview, and of `regard.heads`."""
    table = Table(TITLE, COLUMNS)
    for windows in WINDOWS:
        x = torch.randn(windows, HEADS, TOKENS, WIDTH, generator=torch.Generator().manual_seed(windows))
        model = Windows()
        with torch.no_grad(), record(model) as recording:
            model(x)
        ways = {"direct": partial(compute_directly, x), "dense": partial(compute_dense, x)}
        beside = {"overview": partial(look, x), "heads": partial(score, recording)}
        found = time_contenders(ways, 1e-5, beside=beside).medians
        times = [(found[name], found[name] / found["direct"]) for name in ("dense", "overview", "heads")]
        table.add(windows, found["direct"], *(number for pair in times for number in pair))
    return table


def compute_directly(x: Tensor) -> Tensor:
    """The softmax of the scores."""
    return (x @ x.mT / WIDTH**0.5).softmax(-1)


def compute_dense(x: Tensor) -> Tensor:
    """The matrices of a map."""
    return AttentionMap(x, x).dense()


def look(x: Tensor) -> Tensor:
    """The entropies of an overview, with which all else of it is computed."""
    return AttentionMap(x, x).overview().entropy


def score(recording: Recording) -> Tensor:
    """The scores of every head, of which one is returned."""
    return torch.tensor([row.scores["entropy"] for row in heads(recording).rows])
