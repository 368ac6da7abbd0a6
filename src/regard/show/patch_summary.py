"""An image's attention in the terminal: each layer in numbers, and what one query looks at as a picture of its patches."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from rich.text import Text
from torch import Tensor

from regard.observe import Recording
from regard.observe.text_table import align_columns
from regard.observe.token_places.places import EMPTY, PatchGrid
from regard.show.color_scale import LinearScale
from regard.show.heat_map import format_cell, format_half_blocks, get_cell_style, wrap_sentence
from regard.show.patch_weights import PatchWeights, describe_others, describe_undefined, describe_unseen, find_patch_layers
from regard.show.terminal_colors import Heat, TerminalArea

MAX_PATCHES = 4096  # of a layer whose numbers are computed: all of its weights are
CELLS = 2  # cells of a patch, so that it looks square


@dataclass(frozen=True)
class LayerMeans:
    """Means over the patches and heads of a layer, of the attention of a patch."""

    layer: int
    distance: float
    itself: float
    others: float
    patches: float


def compute_layer_numbers(recording: Recording, layer: int, part: str | None = None) -> LayerMeans:
    """Compute the numbers of a layer of self-attention to patches, of the first image; NaN if no patch is a query."""
    grid = recording.axis_places(layer, "self", part)[1][0]
    assert isinstance(grid, PatchGrid)
    m = recording.map(layer, part=part)
    cells = grid.locate_tokens(m.shape[3])
    sums, count = torch.zeros(4, dtype=torch.float64), 0
    for window in range(grid.windows if grid.has_queries else 0):
        patches = cells[window]
        asking = patches[m.shape[3] - m.shape[2] :] != EMPTY
        one, count = m.select(batch=window), count + int(asking.sum())
        for head in range(m.shape[1]):
            weights = one[0, head].double().cpu()[asking]
            inside = weights[:, patches != EMPTY]
            own = patches[patches != EMPTY]
            far = measure_distances(own, patches[m.shape[3] - m.shape[2] :][asking], grid.columns)
            share = inside / inside.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
            entropy = -torch.special.xlogy(share, share).sum(-1)
            itself = (inside * (far == 0)).sum()
            sums += torch.stack([(share * far).sum(), itself, (weights.sum() - inside.sum()), entropy.exp().sum()])
    means = sums / (m.shape[1] * count)
    return LayerMeans(layer, *means.tolist())


def measure_distances(keys: Tensor, queries: Tensor, columns: int) -> Tensor:
    """Return the distance in patches (q, k) from each query to each key."""
    asking, answering = (torch.stack([one // columns, one % columns], -1).double() for one in (queries, keys))
    return torch.cdist(asking, answering)


def render_layers(recording: Recording, part: str | None = None) -> Iterator[Text]:
    """Generate the table of the layers whose tokens are patches."""
    rows = []
    for layer in find_patch_layers(recording, "self", part):
        if recording.map(layer, part=part).shape[3] <= MAX_PATCHES:
            one = compute_layer_numbers(recording, layer, part)
            cells = f"{one.distance:.1f}", f"{one.itself:.2f}", f"{one.others:.2f}", f"{one.patches:.0f}"
            rows.append((str(layer), *cells))
    yield from (Text(line) for line in align_columns(("layer", "dist", "itself", "others", "patches"), rows, ()))


def render_patches(one: PatchWeights, window: TerminalArea) -> Iterator[Text]:
    """Generate what a query looks at as a picture of the patches: colored cells, or digits where there is no color."""
    yield from wrap_sentence(f"{one.query}: what it looks at, {one.what}", window.width, "bold")
    values = one.values.nan_to_num(0.0)
    rows, columns = values.shape
    halves = window.colors is not None and CELLS * columns > window.width
    wide = 1 if halves or CELLS * columns > window.width else CELLS
    if columns * wide > window.width:
        columns = window.width // wide
        rows = max(rows * columns // values.shape[1], 1)
        values = F.adaptive_max_pool2d(values[None], (rows, columns))[0]
    scale = LinearScale(low=0)
    heat = Heat(scale, scale.ends(values.flatten().tolist()))
    for n in range(0, rows, 2 if halves else 1):
        line = Text()
        lower = values[n + 1] if halves and n + 1 < rows else torch.zeros_like(values[n])
        for upper, under in zip(values[n].tolist(), lower.tolist(), strict=True):
            if halves:
                line.append(*format_half_blocks(upper, under, heat, window.colors or "256"))
            else:
                line.append(format_cell(upper, wide, heat, window.colors), style=get_cell_style(upper, heat, window.colors))
        if window.colors is None:
            line.rstrip()
        yield line
    yield Text.assemble("weight ", heat.render_legend(window.colors, window.width - 7))
    if values.shape != one.values.shape:
        yield from wrap_sentence(
            f"A cell is the largest of several of {one.grid.rows} x {one.grid.columns} patches.", window.width
        )
    if one.undefined:
        yield from wrap_sentence(f"{describe_undefined(one)}; patches with NaN are left blank.", window.width)
    if describe_unseen(one):
        yield from wrap_sentence(f"{describe_unseen(one)}.", window.width)
    if one.others:
        yield from wrap_sentence(f"On other tokens: {describe_others(one)}.", window.width)
