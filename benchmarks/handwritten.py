"""What recording costs where attention is written out by hand: a learner's GPT, and BLOOM of transformers.

Both are of GPT-2's shape, 12 layers of 12 heads of 64, with random weights. Before anything is timed, maps are held against the
model's own softmax of the same forward.
"""

import math
from functools import partial

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import BloomConfig, BloomModel

from benchmarks.recording import CLOSELY
from benchmarks.tables import Table
from benchmarks.timing import time_contenders
from regard import malloc
from regard.observe import record

TITLE = "Attention written out by hand, GPT-2's shape, float32: forward inside record"
COLUMNS = ["model", "T", "plain ms", "record", "middle half", "MB kept"]
LENGTHS, LAYERS, HEADS, WIDTH, VOCABULARY = (128, 512, 1024), 12, 12, 768, 4096


class CausalHeads(nn.Module):
    """Attention as lecture notes write it: products, a triangle of -inf, a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.register_buffer("mask", torch.triu(torch.ones(max(LENGTHS), max(LENGTHS)), diagonal=1).bool())

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (y.view(b, t, HEADS, c // HEADS).transpose(1, 2) for y in self.qkv(x).split(c, -1))
        scores = (q @ k.transpose(2, 3)).masked_fill(self.mask[:t, :t], -torch.inf)
        weights = self.dropout(torch.softmax(scores / math.sqrt(c // HEADS), dim=-1))
        return self.out_proj((weights @ v).transpose(1, 2).contiguous().view(b, t, c))


class Block(nn.Module):
    """Attention and two linear layers, each after a norm and added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm, self.second_norm = CausalHeads(), nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.feed(self.second_norm(x))


def build_models() -> dict[str, nn.Module]:
    """The models by their names."""
    torch.manual_seed(0)
    own = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *(Block() for _ in range(LAYERS)))
    bloom = BloomModel(BloomConfig(hidden_size=WIDTH, n_layer=LAYERS, n_head=HEADS, vocab_size=VOCABULARY))
    return {"a learner's GPT": own.eval(), "BLOOM": bloom.eval()}


def run(peak: dict[torch.dtype, float]) -> Table:
    """Milliseconds of the plain forward, the forward inside record as ratios to it, and what the recording keeps."""
    table = Table(TITLE, COLUMNS)
    for name, model in build_models().items():
        check(model)
        for t in LENGTHS:
            ids = torch.randint(0, VOCABULARY, (1, t), generator=torch.Generator().manual_seed(t))
            ways = {
                "plain": partial(compute, model, ids),
                "record": partial(compute_recorded, model, ids),
            }
            malloc.keep_freed_memory()  # else matrices are new memory in some rounds and not in others
            found = time_contenders(ways, 0, within=CLOSELY / 3)
            malloc.restore_malloc_defaults()
            lower, middle, upper = found.ratio("record", to="plain")
            with torch.no_grad(), record(model) as recording:
                model(ids)
            kept = sum(recording.map(layer).nbytes for layer in range(LAYERS)) / 1e6
            table.add(name, t, found.medians["plain"], middle, f"{lower:.3f} to {upper:.3f}", kept)
    return table


class Softmaxes(TorchFunctionMode):
    """Keeps every softmax."""

    def __init__(self) -> None:
        self.weights: list[Tensor] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") == "softmax":
            self.weights.append(result)
        return result


def check(model: nn.Module) -> None:
    """That the maps are the model's own softmax."""
    ids = torch.randint(0, VOCABULARY, (1, 97), generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), record(model) as recording:
        model(ids)
    with torch.no_grad(), Softmaxes() as own:
        model(ids)
    assert not recording.missed
    assert not recording.notes
    for layer, weights in enumerate(own.weights):
        found = recording.map(layer).dense()
        assert (found - weights.view(found.shape)).abs().max() < 1e-5, "the map is not of the weights that the model computes"


def compute(model: nn.Module, ids: Tensor) -> Tensor:
    """The last hidden state."""
    with torch.no_grad():
        output = model(ids)
    return output if isinstance(output, Tensor) else output.last_hidden_state


def compute_recorded(model: nn.Module, ids: Tensor) -> Tensor:
    """The same inside record."""
    with record(model):
        return compute(model, ids)
