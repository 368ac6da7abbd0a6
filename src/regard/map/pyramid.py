"""The picture of one matrix at every zoom, in tiles: at level z a pixel holds 2^z queries by 2^z keys."""

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.errors import ConfigError
from regard.map.attention_map import AttentionMap
from regard.map.pooling import Picture

TILE = 256  # pixels along each side of a tile
KEPT = 1024  # pixels along each side of the finest level that is kept whole; finer ones are computed a tile at a time


class Pyramid:
    """Tiles of a map of one batch row and head, mean and max of the weights in each pixel.

    Level 0 shows single weights. From the finest level of at most 1024 x 1024 pixels on, which one traversal gives, each
    level is pooled from the finer, so that a lone strong weight stays in the max of every level. What is not visible is 0.
    """

    def __init__(self, m: AttentionMap, batch: int = 0, head: int = 0) -> None:
        self.map = m.select(batch, head)
        self._levels: list[tuple[Tensor, Tensor]] = []  # sums and maxima, from the finest level kept on

    @property
    def levels(self) -> int:
        """The number of levels; the last is a single tile."""
        return self._level_within(TILE) + 1

    def shape(self, level: int) -> tuple[int, int]:
        """The pixels of a level, (rows, columns)."""
        q, k = self.map.shape[2:]
        return -(-q // 2**level), -(-k // 2**level)

    def tile(self, level: int, row: int, column: int, how: Literal["mean", "max"] = "mean") -> Tensor:
        """The tile at a place of a level, at most 256 x 256 pixels; those at the far edges may be smaller."""
        rows, columns = self._span("row", row, level, 0), self._span("column", column, level, 1)
        if how not in ("mean", "max"):
            raise ConfigError(f'how must be "mean" or "max", got {how!r}.')
        q, k = (self._tokens(span, level, axis) for axis, span in enumerate((rows, columns)))
        kept = self._level_within(KEPT)
        if level < kept:
            return self.map.picture(q, k).pooled(how)
        total, largest = (part[slice(*rows), slice(*columns)] for part in self._pooled(level - kept))
        area = (q.diff().unsqueeze(-1) * k.diff()).to(total.device)
        return largest if how == "max" else (total / area).to(largest.dtype)

    def _level_within(self, pixels: int) -> int:
        """The finest level of at most so many pixels a side."""
        level = 0
        while max(self.shape(level)) > pixels:
            level += 1
        return level

    def _span(self, name: str, place: int, level: int, axis: int) -> tuple[int, int]:
        """The pixels of a tile along an axis."""
        if not 0 <= level < self.levels:
            raise ConfigError(f"level must be at least 0 and below {self.levels}, got {level}.")
        pixels = self.shape(level)[axis]
        if not 0 <= place < -(-pixels // TILE):
            raise ConfigError(f"level {level} has {-(-pixels // TILE)} tiles along its {name}s, got {name} {place}.")
        return place * TILE, min(place * TILE + TILE, pixels)

    def _tokens(self, span: tuple[int, int], level: int, axis: int) -> Tensor:
        """Where pixels begin, and the last one ends, in tokens."""
        return (torch.arange(span[0], span[1] + 1) * (1 << level)).clamp(max=self.map.shape[2 + axis])

    def _pooled(self, above: int) -> tuple[Tensor, Tensor]:
        """Sums and maxima of a level, so many above the finest kept."""
        if not self._levels:
            level = self._level_within(KEPT)
            whole = ((0, pixels) for pixels in self.shape(level))
            picture: Picture = self.map.picture(*(self._tokens(span, level, axis) for axis, span in enumerate(whole)))
            self._levels.append((picture.sum, picture.max))
        while len(self._levels) <= above:
            total, largest = self._levels[-1]
            self._levels.append((4 * halved(F.avg_pool2d, total), halved(F.max_pool2d, largest)))
        return self._levels[above]


def halved(pool: Callable[[Tensor, int], Tensor], image: Tensor) -> Tensor:
    """Pixels two by two; an odd row or column is joined by zeros."""
    rows, columns = image.shape
    even = F.pad(image, (0, columns % 2, 0, rows % 2))
    return pool(even[None, None], 2)[0, 0]
