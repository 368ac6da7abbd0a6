"""How well pull predicts what happens when an edge is cut: random edges of SmolLM2-135M-Instruct, cut one at a time.

An edge is a query and a key of a head. Layer, head and query are drawn evenly, the key by the weights of the query. The number
is the logit of the likeliest next word after the last token of a text of 64 tokens; each cut takes one forward. The change is
compared with three numbers that take none: the weight; minus the pull, -A_ij g_i . v_j; and the map of kind "cut", in which the
other weights grow as they do when a key is hidden.
"""

from pathlib import Path

import torch
from torch import Tensor

from benchmarks.tables import Table
from regard import CutEdges, intervene, record
from regard.cli.arguments.look import SMOLLM2
from regard.cli.model_loading import CAUSAL_LM, TextModel, load_model

TEXT = Path(__file__).parents[2] / "shared" / "data" / "text" / "tinyshakespeare.txt"
TITLE = "What cutting an edge did, and what predicted it: 200 edges of SmolLM2-135M-Instruct, ten texts of 64 tokens"
TEXTS, EDGES, TOKENS = 10, 20, 64  # and edges of each text
RESAMPLED = 2000  # times, for the 95 % intervals of the correlations
PREDICTORS = ("weight (with the size of the change)", "minus the pull", "cut")


def run(peak: dict[torch.dtype, float]) -> Table:
    """Correlations, with intervals, of the change of a logit when an edge is cut with what was known before."""
    table = Table(TITLE, ["predicted by", "Pearson", "from", "to", "Spearman"])
    model = load_model(SMOLLM2, CAUSAL_LM)
    ids = torch.tensor(model.encode(TEXT.read_text()[:20_000])).unfold(0, TOKENS, TOKENS)[:TEXTS]
    generator = torch.Generator().manual_seed(0)
    changes, predictions = (torch.cat(parts) for parts in zip(*(cut_edges(model, row, generator) for row in ids), strict=True))
    for name, numbers in zip(PREDICTORS, predictions.T, strict=True):
        measured = changes.abs() if name.startswith("weight") else changes
        low, high = bootstrap_correlation(measured, numbers)
        table.add(name, correlate(measured, numbers), low, high, correlate(rank(measured), rank(numbers)))
    return table


def cut_edges(model: TextModel, ids: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The change of the logit at each edge, and the numbers that predict it, (n,) and (n, 3), float64."""
    inner = model.model
    with torch.enable_grad(), record(inner, keep="values") as recording:
        logits = inner(ids.unsqueeze(0)).logits[0, -1]
    token = int(logits.argmax())
    attribution = recording.attribute(logits[token])
    changes, predictions = [], []
    for _ in range(EDGES):
        layer = int(torch.randint(len(recording.layers()), (), generator=generator))
        weights = recording.map(layer)
        head = int(torch.randint(weights.shape[1], (), generator=generator))
        query = int(torch.randint(1, TOKENS, (), generator=generator))
        row = weights[0, head, query].double()
        key = int(torch.multinomial(row, 1, generator=generator))
        with torch.no_grad(), intervene(inner, CutEdges(query, key, layer=layer, head=head)):
            changed = float(inner(ids.unsqueeze(0)).logits[0, -1, token])
        changes.append(changed - float(logits[token].detach()))
        pull, cut = (float(attribution.map(layer, kind=kind)[0, head, query, key]) for kind in ("pull", "cut"))
        predictions.append((float(row[key]), -pull, cut))
    return torch.tensor(changes, dtype=torch.float64), torch.tensor(predictions, dtype=torch.float64)


def correlate(x: Tensor, y: Tensor) -> float:
    """Pearson's correlation of two vectors."""
    return float(torch.corrcoef(torch.stack([x, y]))[0, 1])


def rank(x: Tensor) -> Tensor:
    """The place of each number in the order of all."""
    return x.argsort().argsort().double()


def bootstrap_correlation(x: Tensor, y: Tensor) -> tuple[float, float]:
    """The 95 % interval of a correlation, from edges drawn again with replacement."""
    drawn = torch.randint(len(x), (RESAMPLED, len(x)), generator=torch.Generator().manual_seed(1))
    found = torch.tensor([correlate(x[rows], y[rows]) for rows in drawn])
    low, high = found.quantile(torch.tensor([0.025, 0.975])).tolist()
    return low, high
