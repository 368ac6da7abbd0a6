"""The picture of one matrix at every zoom, in tiles: at level z a pixel covers 2^z queries by 2^z keys."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.errors import OutOfRangeError
from regard.map import fast, passes
from regard.map.attention_map import AttentionMap
from regard.map.codes import coded
from regard.map.plane import Denominators, Plane
from regard.map.pooling import Picture
from regard.map.visible import visible
from regard.mechanism.arguments import check_choice, check_count, check_instance, check_place, check_whole, describe
from regard.mechanism.scores import wide

TILE = 256  # pixels along each side of a tile
KEPT = 1024  # most pixels along each side of the finest level stored in full precision
CODED = 4096  # most pixels along each side of the finest level stored as codes; finer levels are computed tile by tile
MOST_LEVELS = 62  # more than a map with int64 positions can have
STRIP = 2048  # rows traversed at a time, about
STATISTICS = ("entropy", "largest")
How = Literal["mean", "max"]


@dataclass(eq=False)
class Kept:
    """What a pyramid stores of its matrix: how many rows are done, statistics, and the levels, from the finest on."""

    rows: int = 0  # traversed so far
    statistics: dict[str, Tensor] = field(default_factory=dict)  # each (q,), but `received` (k,)
    below: list[Denominators] = field(default_factory=list)
    codes: dict[tuple[int, str], Tensor] = field(default_factory=dict)  # uint16, levels of 1024 to 4096 pixels, by how
    whole: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # sums and maxima of the coarser levels


class Pyramid:
    """Tiles of a map of one batch row and head: the mean and the max of the weights in each pixel.

    Level 0 shows single weights. One traversal computes the finest level of at most 1024 x 1024 pixels; each coarser level is
    pooled from the one before, so that a single strong weight stays in the max of every level. What is not visible is 0.
    The traversal also stores the two levels before that one as codes, see `codes`, and can be done in strips of rows.
    """

    def __init__(self, m: AttentionMap, batch: int = 0, head: int = 0) -> None:
        b, h, *_ = check_instance("m", m, AttentionMap).shape
        self.map = m.select(check_place("batch", batch, b, "the map"), check_place("head", head, h, "the map"))
        self._kept = Kept()

    @property
    def levels(self) -> int:
        """The number of levels; the last is a single tile."""
        return self._level_within(TILE) + 1

    @property
    def nbytes(self) -> int:
        """The bytes stored besides the map once `strips` is exhausted."""
        q, k = self.map.shape[2:]
        finest, whole = self._level_within(CODED), self._level_within(KEPT)
        (plane,) = self.map._planes()
        size = torch.finfo(wide(plane.request.q.dtype)).bits // 8
        pixels = {level: math.prod(self.shape(level)) for level in range(finest, self.levels)}
        pictures = sum(pixels[level] * (4 if level < whole else 8 + size) for level in pixels)
        return pictures + size * (len(STATISTICS) * q + k)

    @property
    def rows(self) -> dict[str, Tensor]:
        """The entropy, nats, and the largest weight of every row, (q,), once `strips` is exhausted."""
        return {name: self._kept.statistics[name] for name in STATISTICS}

    @property
    def received(self) -> Tensor:
        """The sum of every column, (k,), once `strips` is exhausted."""
        return self._kept.statistics["received"]

    def shape(self, level: int) -> tuple[int, int]:
        """Return the number of pixels of a level, (rows, columns)."""
        level = check_count("level", level, 0, most=MOST_LEVELS)
        q, k = self.map.shape[2:]
        return -(-q // 2**level), -(-k // 2**level)

    def strips(self) -> Iterator[float]:
        """Traverse the matrix in strips of rows, continuing an earlier traversal; yield the share that is done, 1 at last."""
        q, height = self.map.shape[2], self._strip()
        (plane,) = self.map._planes()
        spans = [(start, min(start + height, q)) for start in range(0, q, height)]
        work = [(stop - start) * sum(j - i for i, j in plane.ranges(start, stop)) for start, stop in spans]
        for n, (start, stop) in enumerate(spans):
            if start >= self._kept.rows:
                self._go_over(plane, start, stop)
                self._kept.rows = stop
                yield 0.99 * sum(work[: n + 1]) / max(sum(work), 1)
        self._finish(plane)
        yield 1.0

    def tile(self, level: int, row: int, column: int, how: How = "mean") -> Tensor:
        """Return a tile of a level, at most 256 x 256 pixels; the tiles at the far edges may be smaller."""
        rows, columns = self._places(level, row, column, how)
        q, k = (self._tokens(span, level, axis) for axis, span in enumerate((rows, columns)))
        kept = self._level_within(KEPT)
        if level < kept:
            return self.map.picture(q, k).pooled(how)
        total, largest = (part[slice(*rows), slice(*columns)] for part in self._pooled(level - kept))
        area = (q.diff().unsqueeze(-1) * k.diff()).to(total.device)
        return largest if how == "max" else (total / area).to(largest.dtype)

    def codes(self, level: int, row: int, column: int, how: How = "mean") -> Tensor:
        """Return a tile as 16-bit codes, see regard.map.codes; levels of up to 4096 pixels a side are stored in this form."""
        rows, columns = self._places(level, row, column, how)
        for _ in self.strips():
            pass
        if (level, how) in self._kept.codes:
            return self._kept.codes[level, how][slice(*rows), slice(*columns)]
        (plane,) = self.map._planes()
        edges = [self._tokens(span, level, axis) for axis, span in enumerate((rows, columns))]
        return self._coded(plane, self.tile(level, row, column, how), *edges)

    def _places(self, level: int, row: int, column: int, how: str) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the first and one past the last pixel of a tile along both axes."""
        places = self._span("row", row, level, 0), self._span("column", column, level, 1)
        check_choice("how", how, get_args(How))
        return places

    def _level_within(self, pixels: int) -> int:
        """Return the finest level of at most this many pixels a side."""
        level = 0
        while max(self.shape(level)) > pixels:
            level += 1
        return level

    def _span(self, name: str, place: int, level: int, axis: int) -> tuple[int, int]:
        """Return the first and one past the last pixel of a tile along an axis."""
        if not 0 <= check_whole("level", level) < self.levels:
            raise OutOfRangeError(f"level must be at least 0 and below {self.levels}, got {describe(level)}.")
        pixels = self.shape(level)[axis]
        if not 0 <= check_whole(name, place) < -(-pixels // TILE):
            raise OutOfRangeError(
                f"level {level} has {-(-pixels // TILE)} tiles along its {name}s, got {name} {describe(place)}."
            )
        return place * TILE, min(place * TILE + TILE, pixels)

    def _tokens(self, span: tuple[int, int], level: int, axis: int) -> Tensor:
        """Return the edges of pixels in tokens."""
        return (torch.arange(span[0], span[1] + 1) * (1 << level)).clamp(max=self.map.shape[2 + axis])

    def _strip(self) -> int:
        """Return the rows of a strip: whole pixels of the finest level in full precision, and so of all finer levels."""
        pixel = 1 << self._level_within(KEPT)
        return max(STRIP // pixel, 1) * pixel

    def _go_over(self, plane: Plane, start: int, stop: int) -> None:
        """Add the rows start to stop to the statistics, the denominators and the levels."""
        finest, whole = self._level_within(CODED), self._level_within(KEPT)
        rows = self._tokens((start >> finest, -(-stop // (1 << finest))), finest, 0)
        columns = self._tokens((0, self.shape(finest)[1]), finest, 1)
        gathered, picture = strip(plane, rows, columns)
        self._room(plane, gathered.received)
        for name in STATISTICS:
            self._kept.statistics[name][start:stop] = gathered.rows[name]
        self._kept.statistics["received"] += gathered.received
        self._kept.below.append(gathered.denominators)
        total, largest = picture.sum, picture.max
        for level in range(finest, whole + 1):
            first = start >> level
            if level == whole:
                for kept, new in zip(self._kept.whole[0], (total, largest), strict=True):
                    kept[first : first + len(new)] = new
                break
            spans = (first, first + len(total)), (0, total.shape[1])
            edges = [self._tokens(span, level, axis) for axis, span in enumerate(spans)]
            area = (edges[0].diff().unsqueeze(-1) * edges[1].diff()).to(total.device)
            for how, image in (("mean", (total / area).to(largest.dtype)), ("max", largest)):
                self._kept.codes[level, how][first : first + len(image)] = self._coded(plane, image, *edges)
            total, largest = 4 * halved(F.avg_pool2d, total), halved(F.max_pool2d, largest)

    def _room(self, plane: Plane, like: Tensor) -> None:
        """Allocate the statistics and the levels, once."""
        if self._kept.statistics:
            return
        q, k = self.map.shape[2:]
        self._kept.statistics = {name: like.new_zeros(q) for name in STATISTICS} | {"received": like.new_zeros(k)}
        whole = self._level_within(KEPT)
        for level in range(self._level_within(CODED), whole):
            for how in get_args(How):
                self._kept.codes[level, how] = torch.zeros(self.shape(level), dtype=torch.uint16, device=like.device)
        size = self.shape(whole)
        self._kept.whole = [(like.new_zeros(size, dtype=torch.float64), like.new_zeros(size))]

    def _coded(self, plane: Plane, image: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """Encode a picture, given the edges of its pixels in tokens."""
        return coded(image, visible(plane, rows, columns, image == 0))

    def _finish(self, plane: Plane) -> None:
        """Pool the coarser levels, and pass the denominators of all rows to the map, which then needs no own traversal."""
        if self._kept.below:
            shift, total = (torch.cat([getattr(one, name) for one in self._kept.below]) for name in ("shift", "total"))
            self.map._kept.setdefault((plane.b, plane.h), Denominators(shift, total))
            self._kept.below = []
            while len(self._kept.whole) < self.levels - self._level_within(KEPT):
                total, largest = self._kept.whole[-1]
                self._kept.whole.append((4 * halved(F.avg_pool2d, total), halved(F.max_pool2d, largest)))

    def _pooled(self, above: int) -> tuple[Tensor, Tensor]:
        """Return the sums and maxima of the level this far above the finest in full precision."""
        for _ in self.strips():
            pass
        return self._kept.whole[above]


def strip(plane: Plane, rows: Tensor, columns: Tensor) -> tuple[passes.Gathered, Picture]:
    """Compute the statistics and a picture of some rows of a plane, given the edges of its bins."""
    quick = fast.gather(plane, torch.get_num_threads(), rows, columns) if fast.suits(plane) else None
    return quick or passes.seen(plane, rows, columns, {name: passes.ROWS[name] for name in STATISTICS})


def halved(pool: Callable[[Tensor, int], Tensor], image: Tensor) -> Tensor:
    """Pool pixels two by two; an odd row or column is padded with zeros."""
    rows, columns = image.shape
    even = F.pad(image, (0, columns % 2, 0, rows % 2))
    return pool(even[None, None], 2)[0, 0]
