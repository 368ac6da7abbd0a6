"""The tiles that a processor cuts an image into: where each lies, and their patches as one grid.

Where they lie is measured: the processor is given an image whose colors are its coordinates.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from regard.observe.token_places.places import EMPTY, WHOLE, PatchGrid, list_places
from regard.show.image_input import Pixels

BLUE, SLACK = 200, 8  # of pixels that are a part of the image, not of its padding; of 255
FEWEST = 16  # pixels of the image in a tile
NEAR = 0.1  # of a tile: how far from its place in a row it may lie
Box = tuple[float, float, float, float]  # left, top, right and bottom, as shares of the image


@dataclass(frozen=True)
class TileLayout:
    """`count` images made of one: those that are its tiles, row by row, and the one that shows it whole."""

    rows: int
    columns: int
    tiles: tuple[int, ...]
    whole: int | None
    count: int

    def describe(self) -> str:
        """Return the tiles in words."""
        return f"in {self.columns} x {self.rows} tiles{' and once whole' if self.whole is not None else ''}"


def draw_coordinates(height: int, width: int) -> Pixels:
    """Return an image whose red rises from left to right and whose green rises from top to bottom."""
    across, down = ((np.arange(side) + 0.5) / side * 255 for side in (width, height))
    colors = np.broadcast_arrays(across[None], down[:, None], np.full((height, width), float(BLUE)))
    return np.stack(colors, -1).round().astype(np.uint8)


def find_layout(tiles: Sequence[Pixels]) -> TileLayout | None:
    """Return the layout of the tiles that a processor made of `draw_coordinates`; None unless they fill rows and columns."""
    boxes = [measure_box(one) for one in tiles]
    wholes = [n for n, box in enumerate(boxes) if box is not None and shows_whole(box)]
    whole = wholes[0] if wholes and len(tiles) > 1 else None
    parts = {n: box for n, box in enumerate(boxes) if box is not None and n != whole}
    if not parts:
        return None
    left, top = (min(box[axis] for box in parts.values()) for axis in (0, 1))
    sides = np.array([(box[2] - box[0], box[3] - box[1]) for box in parts.values()])
    side = np.median(sides, 0)
    steps = {n: ((box[0] - left) / side[0], (box[1] - top) / side[1]) for n, box in parts.items()}
    places = {(round(down), round(across)): n for n, (across, down) in steps.items()}
    rows, columns = (max(one[axis] for one in places) + 1 for axis in (0, 1))
    far = max(abs(one - round(one)) for pair in steps.values() for one in pair)
    if far > NEAR or abs(sides / side - 1).max() > NEAR or len(parts) != len(places) or len(parts) != rows * columns:
        return None
    return TileLayout(rows, columns, tuple(places[one] for one in sorted(places)), whole, len(tiles))


def shows_whole(box: Box) -> bool:
    """Return whether a tile shows all of the image."""
    return box[0] < NEAR and box[1] < NEAR and box[2] > 1 - NEAR and box[3] > 1 - NEAR


def measure_box(tile: Pixels) -> Box | None:
    """Return where a tile of `draw_coordinates` lies in it, its padding included; None if it is no part of it, unturned."""
    numbers = tile.astype(float)
    inside = abs(numbers[..., 2] - BLUE) <= SLACK
    if inside.sum() < FEWEST:
        return None
    found = []
    for color, axis in ((0, 1), (1, 0)):
        places, values = np.nonzero(inside)[axis].astype(float), numbers[..., color][inside]
        slope = np.cov(places, values)[0, 1] / max(places.var(ddof=1), 1e-9)
        start = values.mean() - slope * places.mean()
        if slope <= 0 or abs(start + slope * places - values).mean() > SLACK:
            return None
        found += [(start - slope / 2) / 255, (start + slope * (tile.shape[axis] - 0.5)) / 255]
    return found[0], found[2], found[1], found[3]


def stitch_pixels(tiles: Sequence[Pixels], layout: TileLayout) -> Pixels:
    """Return the image that the tiles are parts of."""
    lines = [tiles_of_row(tiles, layout, row) for row in range(layout.rows)]
    return np.concatenate([np.concatenate(line, 1) for line in lines], 0)


def tiles_of_row(tiles: Sequence[Pixels], layout: TileLayout, row: int) -> list[Pixels]:
    """Return the tiles of a row, from left to right."""
    return [tiles[n] for n in layout.tiles[row * layout.columns : (row + 1) * layout.columns]]


def list_images(tiles: Sequence[Pixels], layout: TileLayout) -> list[Pixels]:
    """Return the images that the grids of `stitch_places` are of: the stitched one, and the whole one if there is one."""
    return [stitch_pixels(tiles, layout), *([tiles[layout.whole]] if layout.whole is not None else [])]


def stitch_places(places: Any, layout: TileLayout) -> Any:
    """Return the places of a recording with those of tiles joined: of each layer the grid of all tiles, then the whole image.

    Layers whose batch rows are the tiles are of them as windows. Layers with other places, such as windows within tiles, have
    none.
    """
    if not isinstance(places, Mapping):
        return places
    sizes = [(one[0].rows, one[0].columns) for one in places.values() if is_unpadded(one, layout)]
    found = {name: stitch_place(place, layout, sizes[0] if sizes else None) for name, place in places.items()}
    return {name: place for name, place in found.items() if place is not None} or None


def is_unpadded(place: Any, layout: TileLayout) -> bool:
    """Return whether a place has the grid of the joined tiles already, without the patches of their padding."""
    return isinstance(place, (list, tuple)) and len(place) == 2 and place[0].order is not None and layout.whole is not None


def stitch_place(place: Any, layout: TileLayout, size: tuple[int, int] | None) -> Any:
    """Return a place with those of tiles joined, or None.

    size: rows and columns of the middle of the image that counts, all of it by default.
    """
    if isinstance(place, (list, tuple)):
        if len(place) != layout.count or any(one.order is not None for one in place):
            return place
        tiles = PatchGrid.from_tiles([place[n] for n in layout.tiles], layout.columns)
        return tiles if layout.whole is None else [tiles, replace(place[layout.whole], extent=WHOLE)]
    return spread_rows(place, layout, size) if isinstance(place, PatchGrid) and place.windows == 1 else None


def spread_rows(grid: PatchGrid, layout: TileLayout, size: tuple[int, int] | None = None) -> PatchGrid | None:
    """Return the grid of an image whose tiles are batch rows, each with this grid; None if padding cuts patches in two."""
    whole = layout.rows * grid.rows, layout.columns * grid.columns
    rows, columns = size or whole
    if rows > whole[0] or columns > whole[1] or (whole[0] - rows) % 2 or (whole[1] - columns) % 2:
        return None
    patches = np.full(whole, EMPTY)
    top, left = (whole[0] - rows) // 2, (whole[1] - columns) // 2
    patches[top : top + rows, left : left + columns] = np.arange(rows * columns).reshape(rows, columns)
    tiles = patches.reshape(layout.rows, grid.rows, layout.columns, grid.columns).swapaxes(1, 2).reshape(len(layout.tiles), -1)
    empty = np.full(grid.rows * grid.columns, EMPTY)
    own = list(range(grid.rows * grid.columns)) if grid.order is None else list(grid.order[0])
    order = []
    for n in range(layout.count):
        cells = tiles[layout.tiles.index(n)] if n in layout.tiles else empty
        order.append(tuple(int(cells[one]) if one != EMPTY else EMPTY for one in own))
    return replace(grid, rows=rows, columns=columns, order=tuple(order), names=(), extent=WHOLE)


def crop_edges(tiles: Sequence[Pixels], places: Any) -> list[Pixels]:
    """Return tiles without the edges on which the grids of places have no patches."""
    extents = [one.extent for one in list_places(places) if isinstance(one, PatchGrid) and one.extent is not None]
    _, _, bottom, right = extents[0] if extents else WHOLE
    return [one[: round(bottom * one.shape[0]), : round(right * one.shape[1])] for one in tiles]


def crop_padding(images: Sequence[Pixels], places: Any, layout: TileLayout) -> list[Pixels]:
    """Return the images of `list_images`, the first without the padding of which the places have no patches."""
    found = [one for one in places.values() if is_unpadded(one, layout)] if isinstance(places, Mapping) else []
    if not found:
        return [*images]
    (grid, small), pixels, tile = found[0], images[0], images[1].shape
    height, width = round(grid.rows * tile[0] / small.rows), round(grid.columns * tile[1] / small.columns)
    top, left = max(pixels.shape[0] - height, 0) // 2, max(pixels.shape[1] - width, 0) // 2
    return [pixels[top : top + height, left : left + width], *images[1:]]
