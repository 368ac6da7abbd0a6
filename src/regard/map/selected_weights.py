"""Weights of a map at coordinates: complete rows, or single entries."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from regard.map import passes, small_maps
from regard.map.indexing import group_pairs
from regard.map.map_planes import MapPlanes
from regard.map.plane import Plane
from regard.mechanism.scores import score_dtype

DOT_PRODUCT_COST = 8  # a dot product on its own takes about 8 times as long as one within a matrix product


def gather_rows(planes: MapPlanes, b: Tensor, h: Tensor, i: Tensor, keys: Tensor) -> Tensor:
    """Return the weights (n, m) of rows at coordinates (n,) on some keys (m,)."""
    rows = i.reshape(-1).to(planes.device)
    groups = [(plane, places, rows[places]) for plane, places in group_by_plane(planes, b, h)]
    if are_rows_batch(planes, groups):
        pairs = torch.tensor([(plane.b, plane.h) for plane, *_ in groups], device=planes.device)
        order = torch.cat([places for _, places, _ in groups])
        weights = small_maps.compute_selected_rows(planes.request, pairs, groups[0][2]).flatten(0, 1)
        weights = weights if len(keys) == planes.shape[3] else weights[:, keys]
        is_sorted = torch.equal(order, torch.arange(len(order), device=planes.device))
        return weights if is_sorted else weights[order.argsort()]
    q = planes.request.q
    found = q.new_zeros(b.numel(), len(keys), dtype=score_dtype(q.dtype))
    for plane, places, queries in groups:
        for part, weights in planes.iterate_weights(plane, queries, keys):
            found[places[part]] = weights
    return found


def are_rows_batch(planes: MapPlanes, groups: Sequence[tuple[Plane, Tensor, Tensor]]) -> bool:
    """Return whether rows of planes, their places and queries, are the same few of each, which one product computes."""
    if not groups or not small_maps.are_rows_worth_batch(planes.request, len(groups), len(groups[0][2])):
        return False
    (_, _, queries), *others = groups
    return not any(planes.can_use_denominators(plane, len(queries)) for plane, *_ in groups) and all(
        torch.equal(x, queries) for *_, x in others
    )


def gather_entries(planes: MapPlanes, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Return the weights at coordinates (n,): from all their rows on all their keys, or one by one if that is less work."""
    q = planes.request.q
    found = q.new_zeros(b.numel(), dtype=score_dtype(q.dtype))
    i, j = (x.reshape(-1).to(planes.device) for x in (i, j))
    for plane, places in group_by_plane(planes, b, h):
        i_here, j_here = i[places], j[places]
        (queries, row), (keys, column) = (x.unique(return_inverse=True) for x in (i_here, j_here))
        if planes.can_use_denominators(plane, len(queries)) and DOT_PRODUCT_COST * len(places) < len(queries) * len(keys):
            found[places] = passes.compute_pair_weights(plane, planes.get_denominators(plane), i_here, j_here)
            continue
        for part, weights in planes.iterate_weights(plane, queries, keys):
            inside = (row >= part.start) & (row < part.stop)
            found[places[inside]] = weights[row[inside] - part.start, column[inside]]
    return found


def group_by_plane(planes: MapPlanes, b: Tensor, h: Tensor) -> Iterator[tuple[Plane, Tensor]]:
    """Yield each plane that the coordinates refer to, with the places of its entries in the result."""
    for n, m, places in group_pairs(b, h, planes.shape[1]):
        yield Plane(planes.request, *planes.pairs[n][m]), places.to(planes.device)
