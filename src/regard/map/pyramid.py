"""The picture of one matrix at every zoom, in tiles: at level z a pixel covers 2^z queries by 2^z keys."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.errors import OutOfRangeError
from regard.map import passes
from regard.map.attention_map import AttentionMap
from regard.map.codes import encode_weights
from regard.map.hiding_bias import find_hiding_bias
from regard.map.map_planes import traverse_plane
from regard.map.plane import Denominators, Plane
from regard.map.visible_pixels import find_visible_pixels
from regard.mechanism.arguments import check_choice, check_count, check_index, check_instance, check_integer, describe_value
from regard.mechanism.scores import score_dtype

TILE = 256  # pixels along each side of a tile
KEPT = 1024  # most pixels along each side of the finest level stored in full precision
CODED = 4096  # most pixels along each side of the finest level stored as codes; finer levels are computed tile by tile
MOST_LEVELS = 62  # more than a map with int64 positions can have
STRIP = 2048  # rows traversed at a time, about
STATISTICS = ("entropy", "largest")
How = Literal["mean", "max"]


@dataclass(eq=False)
class PyramidData:
    """What a pyramid stores of its matrix: how many rows are done, statistics, and the levels, from the finest on."""

    rows: int = 0  # traversed so far
    statistics: dict[str, Tensor] = field(default_factory=dict)  # each (q,), but `received` (k,)
    denominators: list[Denominators] = field(default_factory=list)
    codes: dict[tuple[int, str], Tensor] = field(default_factory=dict)  # uint16, levels of 1024 to 4096 pixels, by how
    pooled_levels: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # sums and maxima of the coarser levels


class Pyramid:
    """Tiles of a map of one batch row and head: the mean and the max of the weights in each pixel.

    Level 0 shows single weights. One traversal computes the finest level of at most 1024 x 1024 pixels; each coarser level is
    pooled from the one before, so that a single strong weight stays in the max of every level. What is not visible is 0.
    The traversal also stores the two levels before that one as codes, see `codes`, and can be done in strips of rows.
    """

    def __init__(self, m: AttentionMap, batch: int = 0, head: int = 0) -> None:
        b, h, *_ = check_instance("m", m, AttentionMap).shape
        self.map = m.select(check_index("batch", batch, b, "the map"), check_index("head", head, h, "the map"))
        self._data = PyramidData()

    @cached_property
    def _hiding_bias(self) -> float:
        """The largest number in the bias that hides its key; -inf if no other number does."""
        return find_hiding_bias(self.map.planes.request)

    @property
    def levels(self) -> int:
        """The number of levels; the last is a single tile."""
        return self._find_level(TILE) + 1

    @property
    def nbytes(self) -> int:
        """The bytes stored besides the map once `iterate_strips` is exhausted."""
        q, k = self.map.shape[2:]
        finest, whole = self._find_level(CODED), self._find_level(KEPT)
        (plane,) = self.map.planes
        size = torch.finfo(score_dtype(plane.request.q.dtype)).bits // 8
        pixels = {level: math.prod(self.shape(level)) for level in range(finest, self.levels)}
        pictures = sum(pixels[level] * (4 if level < whole else 8 + size) for level in pixels)
        return pictures + size * (len(STATISTICS) * q + k)

    @property
    def rows(self) -> dict[str, Tensor]:
        """The entropy, nats, and the largest weight of every row, (q,), once `iterate_strips` is exhausted."""
        return {name: self._data.statistics[name] for name in STATISTICS}

    @property
    def received(self) -> Tensor:
        """The sum of every column, (k,), once `iterate_strips` is exhausted."""
        return self._data.statistics["received"]

    def shape(self, level: int) -> tuple[int, int]:
        """Return the number of pixels of a level, (rows, columns)."""
        level = check_count("level", level, 0, most=MOST_LEVELS)
        q, k = self.map.shape[2:]
        return -(-q // 2**level), -(-k // 2**level)

    def iterate_strips(self) -> Iterator[float]:
        """Traverse the matrix in strips of rows, continuing an earlier traversal; yield the share that is done, 1 at last."""
        q, height = self.map.shape[2], self._count_strip_rows()
        (plane,) = self.map.planes
        spans = [(start, min(start + height, q)) for start in range(0, q, height)]
        work = [(stop - start) * sum(j - i for i, j in plane.find_key_ranges(start, stop)) for start, stop in spans]
        for n, (start, stop) in enumerate(spans):
            if start >= self._data.rows:
                self._traverse_strip(plane, start, stop)
                self._data.rows = stop
                yield 0.99 * sum(work[: n + 1]) / max(sum(work), 1)
        self._pool_levels(plane)
        yield 1.0

    def tile(self, level: int, row: int, column: int, how: How = "mean") -> Tensor:
        """Return a tile of a level, at most 256 x 256 pixels; the tiles at the far edges may be smaller."""
        rows, columns = self._locate_tile(level, row, column, how)
        q, k = (self._pixel_edges(span, level, axis) for axis, span in enumerate((rows, columns)))
        kept = self._find_level(KEPT)
        if level < kept:
            return self.map.draw_picture(q, k).pool(how)
        total, largest = (part[slice(*rows), slice(*columns)] for part in self._get_level(level - kept))
        area = (q.diff().unsqueeze(-1) * k.diff()).to(total.device)
        return largest if how == "max" else (total / area).to(largest.dtype)

    def codes(self, level: int, row: int, column: int, how: How = "mean") -> Tensor:
        """Return a tile as 16-bit codes, see regard.map.codes; levels of up to 4096 pixels a side are stored in this form."""
        rows, columns = self._locate_tile(level, row, column, how)
        for _ in self.iterate_strips():
            pass
        if (level, how) in self._data.codes:
            return self._data.codes[level, how][slice(*rows), slice(*columns)]
        (plane,) = self.map.planes
        edges = [self._pixel_edges(span, level, axis) for axis, span in enumerate((rows, columns))]
        return self._encode_image(plane, self.tile(level, row, column, how), *edges)

    def _locate_tile(self, level: int, row: int, column: int, how: str) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the first and one past the last pixel of a tile along both axes."""
        places = self._locate_span("row", row, level, 0), self._locate_span("column", column, level, 1)
        check_choice("how", how, get_args(How))
        return places

    def _find_level(self, pixels: int) -> int:
        """Return the finest level of at most this many pixels a side."""
        level = 0
        while max(self.shape(level)) > pixels:
            level += 1
        return level

    def _locate_span(self, name: str, place: int, level: int, axis: int) -> tuple[int, int]:
        """Return the first and one past the last pixel of a tile along an axis."""
        if not 0 <= check_integer("level", level) < self.levels:
            raise OutOfRangeError(f"level must be at least 0 and below {self.levels}, got {describe_value(level)}.")
        pixels = self.shape(level)[axis]
        if not 0 <= check_integer(name, place) < -(-pixels // TILE):
            raise OutOfRangeError(
                f"level {level} has {-(-pixels // TILE)} tiles along its {name}s, got {name} {describe_value(place)}."
            )
        return place * TILE, min(place * TILE + TILE, pixels)

    def _pixel_edges(self, span: tuple[int, int], level: int, axis: int) -> Tensor:
        """Return the edges of pixels in tokens."""
        return (torch.arange(span[0], span[1] + 1) * (1 << level)).clamp(max=self.map.shape[2 + axis])

    def _count_strip_rows(self) -> int:
        """Return the rows of a strip: whole pixels of the finest level in full precision, and so of all finer levels."""
        pixel = 1 << self._find_level(KEPT)
        return max(STRIP // pixel, 1) * pixel

    def _traverse_strip(self, plane: Plane, start: int, stop: int) -> None:
        """Add the rows start to stop to the statistics, the denominators and the levels."""
        finest, whole = self._find_level(CODED), self._find_level(KEPT)
        rows = self._pixel_edges((start >> finest, -(-stop // (1 << finest))), finest, 0)
        columns = self._pixel_edges((0, self.shape(finest)[1]), finest, 1)
        gathered, picture = traverse_plane(plane, rows, columns, {name: passes.ROWS[name] for name in STATISTICS})
        self._allocate(plane, gathered.received)
        for name in STATISTICS:
            self._data.statistics[name][start:stop] = gathered.rows[name]
        self._data.statistics["received"] += gathered.received
        self._data.denominators.append(gathered.denominators)
        total, largest = picture.sum, picture.max
        for level in range(finest, whole + 1):
            first = start >> level
            if level == whole:
                for kept, new in zip(self._data.pooled_levels[0], (total, largest), strict=True):
                    kept[first : first + len(new)] = new
                break
            spans = (first, first + len(total)), (0, total.shape[1])
            edges = [self._pixel_edges(span, level, axis) for axis, span in enumerate(spans)]
            area = (edges[0].diff().unsqueeze(-1) * edges[1].diff()).to(total.device)
            for how, image in (("mean", (total / area).to(largest.dtype)), ("max", largest)):
                self._data.codes[level, how][first : first + len(image)] = self._encode_image(plane, image, *edges)
            total, largest = 4 * halve_image(F.avg_pool2d, total), halve_image(F.max_pool2d, largest)

    def _allocate(self, plane: Plane, like: Tensor) -> None:
        """Allocate the statistics and the levels, once."""
        if self._data.statistics:
            return
        q, k = self.map.shape[2:]
        self._data.statistics = {name: like.new_zeros(q) for name in STATISTICS} | {"received": like.new_zeros(k)}
        whole = self._find_level(KEPT)
        for level in range(self._find_level(CODED), whole):
            for how in get_args(How):
                self._data.codes[level, how] = torch.zeros(self.shape(level), dtype=torch.uint16, device=like.device)
        size = self.shape(whole)
        self._data.pooled_levels = [(like.new_zeros(size, dtype=torch.float64), like.new_zeros(size))]

    def _encode_image(self, plane: Plane, image: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """Encode a picture, given the edges of its pixels in tokens."""
        return encode_weights(image, find_visible_pixels(plane, rows, columns, image == 0, self._hiding_bias))

    def _pool_levels(self, plane: Plane) -> None:
        """Pool the coarser levels, and pass the denominators of all rows to the map, which then needs no own traversal."""
        if self._data.denominators:
            shift, total = (torch.cat([getattr(one, name) for one in self._data.denominators]) for name in ("shift", "total"))
            self.map.planes.denominators.add([(plane.b, plane.h)], Denominators(shift, total)[None])
            self._data.denominators = []
            while len(self._data.pooled_levels) < self.levels - self._find_level(KEPT):
                total, largest = self._data.pooled_levels[-1]
                self._data.pooled_levels.append((4 * halve_image(F.avg_pool2d, total), halve_image(F.max_pool2d, largest)))

    def _get_level(self, above: int) -> tuple[Tensor, Tensor]:
        """Return the sums and maxima of the level this far above the finest in full precision."""
        for _ in self.iterate_strips():
            pass
        return self._data.pooled_levels[above]


def halve_image(pool: Callable[[Tensor, int], Tensor], image: Tensor) -> Tensor:
    """Pool pixels two by two; an odd row or column is padded with zeros."""
    rows, columns = image.shape
    even = F.pad(image, (0, columns % 2, 0, rows % 2))
    return pool(even[None, None], 2)[0, 0]
