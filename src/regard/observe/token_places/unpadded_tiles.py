"""Images among words as LLaVA-NeXT and LLaVA-OneVision write them: small and whole, then in tiles without their padding.

The tiles of the resolution that fits an image best are joined, the rows and columns that were padded are cut off, and each row
of patches ends with a token of its own.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from regard.observe.token_places.media import Media
from regard.observe.token_places.places import EMPTY, PatchGrid

PINPOINTS = "image_grid_pinpoints"  # an attribute of a config: the resolutions, (height, width) in pixels
RATIO = "vision_aspect_ratio"  # an attribute of a config; its last digit is the most tiles whose patches are not shrunk
SHRINKS_FROM = 1.1  # of the side, as in LLaVA-OneVision
Sides = tuple[int, int]


def find_unpadded_tiles(config: Any, media: Media, tile: Sides) -> list[PatchGrid]:
    """Return two grids for each image of a text: of its joined tiles, and of the small whole image, which stands before them.

    tile: rows and columns of the patches of one tile. Empty unless the tokens of all images are exactly these.
    """
    pinpoints, sizes = getattr(config, PINPOINTS, None), media.original_sizes
    side = getattr(getattr(config, "vision_config", None), "image_size", None)
    if not pinpoints or not sizes or not isinstance(side, int) or len(sizes) % media.rows:
        return []
    own = sizes[: len(sizes) // media.rows]
    fine = [measure_joined_tiles(config, size, choose_resolution(size, pinpoints), side, tile) for size in own]
    if own * media.rows != sizes:
        return []
    for newline in (0, 1):  # LLaVA-OneVision has one more token at the end of each image
        if sum(tile[0] * tile[1] + rows * (columns + 1) + newline for rows, columns in fine) == len(media.image_tokens):
            return list(split_tokens(media.image_tokens, fine, tile, newline))
    return []


def split_tokens(tokens: tuple[int, ...], fine: Sequence[Sides], tile: Sides, newline: int) -> Iterator[PatchGrid]:
    """Generate the two grids of each image; ends where the tokens of one are not consecutive."""
    first = 0
    for rows, columns in fine:
        small = tile[0] * tile[1]
        count = small + rows * (columns + 1) + newline
        start = tokens[first]
        if tokens[first : first + count] != tuple(range(start, start + count)):
            return
        order = [row * columns + column if column < columns else EMPTY for row in range(rows) for column in range(columns + 1)]
        yield PatchGrid(rows, columns, start + small, (tuple(order),))
        yield PatchGrid(*tile, start)
        first += count


def choose_resolution(size: Sides, resolutions: Sequence[Sequence[int]]) -> Sides:
    """Return the resolution in which most pixels of an image are kept, and of those the one with the least padding."""

    def rate(resolution: Sequence[int]) -> tuple[int, int]:
        scale = min(resolution[1] / size[1], resolution[0] / size[0])
        kept = min(int(size[1] * scale) * int(size[0] * scale), size[0] * size[1])
        return kept, kept - resolution[0] * resolution[1]

    rows, columns = max(resolutions, key=rate)
    return int(rows), int(columns)


def measure_joined_tiles(config: Any, size: Sides, resolution: Sides, side: int, tile: Sides) -> Sides:
    """Return the rows and columns of patches of the joined tiles of an image (height, width), without padding.

    side: of a tile in pixels.
    """
    rows, columns = resolution[0] // side * tile[0], resolution[1] // side * tile[1]
    if size[1] / size[0] > columns / rows:
        rows -= (rows - int(round(size[0] * (columns / size[1]), 7))) // 2 * 2
    else:
        columns -= (columns - int(round(size[1] * (rows / size[0]), 7))) // 2 * 2
    most = str(getattr(config, RATIO, "")).rpartition("_")[2]
    shrink = (rows * columns / (int(most) * tile[0] ** 2)) ** 0.5 if most.isdecimal() else 1.0
    return (int(rows // shrink), int(columns // shrink)) if shrink > SHRINKS_FROM else (rows, columns)
