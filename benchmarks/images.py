"""What recording costs a model of images, whose pixels are followed to the keys of each layer: a ViT and a Swin.

Both are of transformers, small, with random weights, and see 224 x 224 pixels. Before anything is timed, the patches of every
layer must have been found.
"""

from functools import partial

import torch
from torch import Tensor, nn
from transformers import SwinConfig, SwinModel, ViTConfig, ViTModel

from benchmarks.recording import CLOSELY
from benchmarks.tables import Table
from benchmarks.timing import time_contenders
from regard import malloc
from regard.observe import record

TITLE = "Models of images, 224 x 224 pixels, float32: forward inside record"
COLUMNS = ["model", "images", "plain ms", "record", "middle half"]
BATCHES = 1, 8


def build_models() -> dict[str, nn.Module]:
    """The models by their names."""
    torch.manual_seed(0)
    vit = ViTModel(ViTConfig(hidden_size=192, num_hidden_layers=12, num_attention_heads=3, intermediate_size=768))
    return {"ViT, width 192": vit.eval(), "Swin, width 48": SwinModel(SwinConfig(embed_dim=48)).eval()}


def run(peak: dict[torch.dtype, float]) -> Table:
    """Milliseconds of the plain forward, and the forward inside record as a ratio to it."""
    table = Table(TITLE, COLUMNS)
    for name, model in build_models().items():
        for count in BATCHES:
            pixels = torch.randn(count, 3, 224, 224, generator=torch.Generator().manual_seed(count))
            check(model, pixels)
            ways = {"plain": partial(compute, model, pixels), "record": partial(compute_recorded, model, pixels)}
            malloc.keep_freed_memory()
            found = time_contenders(ways, 0, within=CLOSELY / 3)
            malloc.restore_malloc_defaults()
            lower, middle, upper = found.ratio("record", to="plain")
            table.add(name, count, found.medians["plain"], middle, f"{lower:.3f} to {upper:.3f}")
    return table


def check(model: nn.Module, pixels: Tensor) -> None:
    """That the keys of every layer were followed to their pixels."""
    with torch.no_grad(), record(model) as recording:
        model(pixels)
    assert not recording.missed
    assert all(recording.axis_places(name)[1] for name in recording.names)
    assert all(k is not None for _, k in recording.last.positions.values())


def compute(model: nn.Module, pixels: Tensor) -> Tensor:
    """The last hidden state."""
    with torch.no_grad():
        return model(pixels).last_hidden_state


def compute_recorded(model: nn.Module, pixels: Tensor) -> Tensor:
    """The same inside record."""
    with record(model):
        return compute(model, pixels)
