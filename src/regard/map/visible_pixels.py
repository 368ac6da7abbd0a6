"""Which pixels of a picture hold a visible entry."""

import torch
from torch import Tensor

from regard.map.hiding_bias import find_hiding_bias
from regard.map.plane import Plane

SAMPLED_SIDE = 8  # sampled rows and keys of a pixel: all of them up to this side, else evenly spaced


def find_visible_pixels(plane: Plane, rows: Tensor, columns: Tensor, among: Tensor, hiding_bias: float | None = None) -> Tensor:
    """Return which of the pixels in `among`, bool (r, c), hold a visible entry.

    rows and columns are the edges of the pixels in tokens. The bounds of a mask decide for most pixels; the mask itself is
    evaluated for the others, at 8 x 8 entries of each pixel if it, or a bias, hides single entries. hiding_bias is what
    `find_hiding_bias` returns for the plane's request, which is computed where it is not given.
    """
    device, among, rows, columns = among.device, among.cpu(), rows.cpu(), columns.cpu()
    found = torch.zeros_like(among)
    starts, ends = columns[:-1], columns[1:]
    unsure: list[tuple[int, Tensor]] = []
    hiding = find_hiding_bias(plane.request) if hiding_bias is None else hiding_bias
    for i in among.any(1).nonzero().flatten().tolist():
        bounds = plane.make_query_block(int(rows[i]), int(rows[i + 1]))
        rule = plane.request.mask
        may, must = (
            find_overlaps(spans(bounds, plane.shape[1]), starts, ends)
            for spans in (rule.find_possible_keys, rule.find_certain_keys)
        )
        sure = must if plane.bias is None else torch.zeros_like(must)
        found[i] = sure & among[i]
        open_ = (may & ~sure & among[i]).nonzero().flatten()
        if len(open_):
            unsure.append((i, open_))
    for i, those in unsure:
        found[i, those] = can_see_any(
            plane, sample_entries(rows[i : i + 1], rows[i + 1 : i + 2])[0], sample_entries(starts[those], ends[those]), hiding
        )
    return found.to(device)


def find_overlaps(spans: tuple[tuple[int, int], ...], starts: Tensor, ends: Tensor) -> Tensor:
    """Return which of some intervals of keys share a key with any span."""
    found = torch.zeros(len(starts), dtype=torch.bool, device=starts.device)
    for first, last in spans:
        found |= (starts < last) & (ends > first)
    return found


def sample_entries(starts: Tensor, ends: Tensor) -> Tensor:
    """Return 8 evenly spaced entries of each interval, (n, 8), the first and the last among them."""
    return starts.unsqueeze(-1) + torch.arange(SAMPLED_SIDE, device=starts.device) * (ends - starts - 1).unsqueeze(-1) // (
        SAMPLED_SIDE - 1
    )


def can_see_any(plane: Plane, queries: Tensor, keys: Tensor, hiding_bias: float) -> Tensor:
    """Return whether any of some queries (m,) may see any of the keys of each pixel (n, 8)."""
    flat, queries = keys.reshape(-1), queries.unsqueeze(-1)
    seen = plane.can_see(queries, flat).expand(len(queries), len(flat))
    if plane.bias is not None:
        seen = seen & ~(plane.bias[queries, flat] <= hiding_bias)
    return seen.any(0).view(keys.shape).any(-1).to(keys.device)
