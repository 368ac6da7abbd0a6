"""What the scores of heads, a rollout, the largest weights and a picture of long texts cost, beside the overview of a map.

Eight heads of width 64 attend causally to random numbers, in one layer. How fast each grows is its seconds to those at half
the length, where 4 is that of the number of weights. Equal to complete matrices are the scores at the shortest length.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.tables import Table
from benchmarks.timing import measure_seconds
from regard import heads
from regard.observe import Recording, record
from regard.observe.rollout import rollout

TITLE = "Scores of eight heads of width 64, causal, float32, seconds"
COLUMNS = ["T", "overview", "heads", "ratio", "rollout of 5 queries", "ratio", "top 8", "growth", "pooled to 64 x 64", "growth"]
LENGTHS, HEADS, WIDTH, SHORT, TOP, BINS = (8192, 16_384, 32_768, 65_536), 8, 64, 512, 8, 64


class Causal(nn.Module):
    """Causal attention of x (b, h, t, d)."""

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)


def run(peak: dict[torch.dtype, float]) -> Table:
    """A row for each length."""
    check()
    table, before = Table(TITLE, COLUMNS), dict[str, float]()
    for t in LENGTHS:
        recording = make_recording(t)
        tokens = torch.randint(0, 500, (1, t), generator=torch.Generator().manual_seed(t))
        queries = torch.linspace(t // 2, t - 1, 5).long()
        ways: dict[str, Callable[[], object]] = {
            "overview": partial(look, recording),
            "heads": partial(heads, recording, tokens=tokens),
            "rollout": partial(rollout, recording, queries),
            "top": partial(find_top, recording),
            "pooled": partial(pool, recording),
        }
        took = {name: measure_seconds(way) for name, way in ways.items()}
        ratios = {name: took[name] / took["overview"] for name in ("heads", "rollout")}
        growth = {name: took[name] / before[name] if before else None for name in ("top", "pooled")}
        table.add(
            t,
            took["overview"],
            took["heads"],
            ratios["heads"],
            took["rollout"],
            ratios["rollout"],
            took["top"],
            growth["top"],
            took["pooled"],
            growth["pooled"],
        )
        before = took
    return table


def look(recording: Recording) -> object:
    """Compute the overview of all heads."""
    return recording.map(0).overview()


def find_top(recording: Recording) -> object:
    """Find the largest weights of each row."""
    return recording.map(0).top(TOP)


def pool(recording: Recording) -> object:
    """Draw the picture of each head."""
    return recording.map(0).pooled(BINS, BINS)


def make_recording(t: int) -> Recording:
    """Record random numbers of this length."""
    x = torch.randn(1, HEADS, t, WIDTH, generator=torch.Generator().manual_seed(t))
    model = Causal()
    with torch.no_grad(), record(model) as recording:
        model(x)
    return recording


def check() -> None:
    """Hold entropy, rollout, largest and pooled weights against complete matrices, which compiles the passes too."""
    recording = make_recording(SHORT)
    m = recording.map(0)
    dense = m.dense().double()
    entropy = -torch.special.xlogy(dense, dense).sum(-1).mean((0, 2))
    found = torch.tensor([row.scores["entropy"] for row in heads(recording).rows], dtype=torch.float64)
    mean = 0.5 * dense.mean(1)[0] + 0.5 * torch.eye(SHORT, dtype=torch.float64)
    pairs = {
        "entropy": (found, entropy),
        "rollout": (rollout(recording, [3, SHORT - 1])[0].double(), mean[[3, SHORT - 1]]),
        "top": (m.top(TOP)[0].double(), dense.topk(TOP).values),
        "pooled": (m.pooled(8, 8, "sum").double(), dense.unflatten(-1, (8, -1)).unflatten(-3, (8, -1)).sum((-3, -1))),
    }
    for name, (ours, theirs) in pairs.items():
        off = float((ours - theirs).abs().max())
        assert off < 1e-4, f"{name} differs by {off:.1e}"
