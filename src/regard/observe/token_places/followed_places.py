"""Places from positions: the grid on which the keys of a layer lie in the images, by the pixels that each was made from."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from regard.observe.interception.pixels.position_lattice import FIRST
from regard.observe.recorded_runs.run import Positions
from regard.observe.token_places.media import Media
from regard.observe.token_places.places import CROSS, EMPTY, PatchGrid

TOLERANCE = 1e-3  # pixels


def find_followed_grids(positions: Mapping[tuple[str, str], Positions], media: Media) -> dict[str, PatchGrid | None]:
    """Return the grid of each layer whose keys' positions are known, by its path; None if they form none.

    Of cross attention whose keys have none, it is the grid of its queries, if they form one.
    """
    found: dict[str, PatchGrid | None] = {}
    for (name, kind), (q, k) in positions.items():
        if media.size is None:
            continue
        if kind == CROSS and k is None and q is not None and name not in found and q.shape[1] > 1:
            grid = fit_grid(q, media.images, media.size)
            found |= {} if grid is None else {name: replace(grid, has_keys=False)}
        if k is None:
            continue
        grid = fit_grid(k, media.images, media.size)
        has_queries = q is not None and torch.equal(q, k)
        found[name] = grid if grid is None or has_queries else replace(grid, has_queries=False)
    return found


def fit_grid(positions: Tensor, images: int, size: tuple[int, int]) -> PatchGrid | None:
    """Return the grid of keys with positions (b, k), as pixel_positions.py has them; None if they form none.

    They form one if each image has a key at every crossing of rows and columns that are evenly spaced and cover it. The batch
    rows are the windows of one image after the other, or each is a whole image, which several rows may share.
    """
    positions = positions.cpu()
    if not images or not positions.numel():
        return None
    above = ((positions.real - FIRST) / (2 * size[0]) + 0.25).floor() * 2 * size[0]  # images lie below each other
    positions = torch.where(positions == 0, 0, positions - above)  # in each image, from FIRST
    if are_equal(positions):
        own = positions[:1]
    elif len(positions) % images == 0 and are_equal(windows := positions.view(images, -1, positions.shape[1])):
        own = windows[0]
    else:
        return None
    is_patch = own != 0
    if not bool(is_patch.any()):
        return None
    down, across = (find_lines(line[is_patch] - FIRST, side) for line, side in ((own.real, size[0]), (own.imag, size[1])))
    if down is None or across is None:
        return None
    (rows, row, tall), (columns, column, wide) = down, across
    patches = torch.full(own.shape, EMPTY)
    patches[is_patch] = row * columns + column
    tokens = is_patch.any(0).nonzero().flatten()
    start, end = int(tokens[0]), int(tokens[-1]) + 1
    order = patches[:, start:end]
    if rows * columns == 1 or not torch.equal(order[order != EMPTY].sort().values, torch.arange(rows * columns)):
        return None
    is_plain = len(own) == 1 and torch.equal(order[0], torch.arange(rows * columns))
    extent = None if tall is None or wide is None else (tall[0], wide[0], tall[1], wide[1])
    return PatchGrid(rows, columns, start, None if is_plain else tuple(map(tuple, order.tolist())), extent=extent)


def are_equal(positions: Tensor) -> bool:
    """Return whether positions are the same for each entry of the first dimension."""
    return float((positions - positions[:1]).abs().max()) <= TOLERANCE  # means of channels at several places are rounded


def find_lines(coordinates: Tensor, side: int) -> tuple[int, Tensor, tuple[float, float] | None] | None:
    """Return the number of evenly spaced lines through coordinates, that of each, and the shares of a side that they span.

    None if they do not cover the side. They do if a patch more or less would be too much, as where edges are cut off or padded,
    or if each line is less than half a patch from the middle of its part of the side. What a single line spans is not known.
    """
    lines = coordinates.unique()
    lines = lines[torch.cat([torch.tensor([True]), lines.diff() > TOLERANCE])]
    count = len(lines)
    step = float(lines[-1] - lines[0]) / (count - 1) if count > 1 else float(side)
    middles = (torch.arange(count) + 0.5) * side / count - 0.5
    are_near = bool(((lines - middles).abs() < side / count / 2 - TOLERANCE).all())
    is_whole = float(lines[0]) < step and abs(count * step - side) < step and float(lines[-1]) <= side - 1 + step / 2
    if not bool(((lines.diff() - step).abs() < TOLERANCE).all()) or not (are_near or is_whole):
        return None
    start = 0.0 if abs(count * step - side) < TOLERANCE else float(lines[0]) + 0.5 - step / 2
    shares = None if count == 1 else (start / side, (start + count * step) / side)
    return count, ((coordinates - lines[0]) / step).round().long(), shares
