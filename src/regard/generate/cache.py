"""Cache: the keys and values of the tokens a model has read, so that each is computed once.

Every sequence has a row, and the key of its token number n stands in slot n of that row. A query at position p sees the
slots up to p: the rule hides what is not written yet, and what was cropped away, so that nothing is ever cleared.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from regard.errors import ConfigError, ShapeError
from regard.mechanism.rule import Offset


class Cache:
    """Keys and values of up to `room` tokens a row, (b, h, room, d) a layer, allocated once and written in place.

    A model asks three things of it: `extend`, where the next tokens stand; `layer`, the past of an attention layer, which
    takes the new keys and values and gives all of them and the offset of the new queries; and `asked`, the vectors whose
    logits are wanted. The number, the width and the dtype of heads are those of the first keys that come.
    """

    def __init__(self, layers: int, room: int) -> None:
        if layers < 1 or room < 1:
            raise ConfigError(f"a cache needs a layer and room for a token, got layers={layers}, room={room}.")
        self.room = room
        self.lengths: Offset = 0  # tokens read: one number where all rows have as many, which is faster, else (b,)
        self.wanted: int | Tensor | None = None  # logits of the last so many tokens, of one in each row, or of all
        self._start: Offset = 0  # of the tokens under way
        self._stop = 0  # of the longest row
        self._keys: list[Tensor | None] = [None] * layers
        self._values: list[Tensor | None] = [None] * layers

    def extend(self, tokens: Tensor) -> Tensor:
        """The positions of the next tokens, (t,) or (b, t), which are counted as read from here on."""
        t = tokens.shape[-1]
        start, steps = self.advance(t), torch.arange(t, device=tokens.device)
        return steps + (start.unsqueeze(-1) if isinstance(start, Tensor) else start)

    def advance(self, t: int) -> Offset:
        """Counts t more tokens of each row as read: the position of the first of them."""
        stop = self.longest + t
        if stop > self.room:
            raise ConfigError(f"the cache has room for {self.room} tokens: {self.longest} are read, and {t} more were given.")
        self._start, self._stop = self.lengths, stop
        self.lengths = self.lengths + t
        return self._start

    def layer(self, number: int) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Offset]]:
        """The past of a layer: new keys and values to all of them, and the position of the first new query."""
        return partial(self._put, number)

    def asked(self, x: Tensor) -> Tensor:
        """The vectors, of (b, t, c), whose logits are wanted: a prompt needs those of its last token only."""
        if isinstance(self.wanted, Tensor):
            return x[torch.arange(len(x), device=x.device), self.wanted].unsqueeze(1)
        return x if self.wanted is None else x[..., x.shape[-2] - self.wanted :, :]

    @property
    def longest(self) -> int:
        """How many tokens the longest row has."""
        return int(self.lengths.max()) if isinstance(self.lengths, Tensor) else self.lengths

    @property
    def kept(self) -> list[tuple[Tensor | None, Tensor | None]]:
        """The keys and values of each layer, (b, h, room, d), none before the first; what is not read yet is not cleared."""
        return list(zip(self._keys, self._values, strict=True))

    def crop(self, lengths: Offset) -> None:
        """Forgets all but the first tokens, so many of each row, or of all."""
        if isinstance(lengths, Tensor) and bool((lengths == lengths[0]).all()):
            lengths = int(lengths[0])
        longer = torch.as_tensor(lengths) > torch.as_tensor(self.lengths)
        if longer.any():
            raise ConfigError(f"a cache is cropped to what it has, {self.lengths} tokens, not to {lengths}.")
        self.lengths = lengths

    def fork(self, rows: int | Tensor, room: int | None = None) -> "Cache":
        """A cache of these rows of this one, or of one row so many times, with nothing computed again."""
        other = Cache(len(self._keys), self.room if room is None else room)
        if self.longest > other.room:
            raise ConfigError(f"{self.longest} tokens are read, and the fork has room for {other.room}.")
        index = torch.zeros(rows, dtype=torch.int64) if isinstance(rows, int) else rows
        other.lengths = picked(self.lengths, index)
        other._keys = [self._copied(x, index, other.room) for x in self._keys]
        other._values = [self._copied(x, index, other.room) for x in self._values]
        return other

    def reorder(self, rows: Tensor) -> None:
        """Puts other rows in the place of these, as many: beams that survived."""
        used = self.longest
        self.lengths = picked(self.lengths, rows)
        for x in (*self._keys, *self._values):
            if x is not None:
                x[:, :, :used] = x[rows.to(x.device), :, :used]

    def _copied(self, x: Tensor | None, rows: Tensor, room: int) -> Tensor | None:
        if x is None:
            return None
        copy = x.new_empty(len(rows), x.shape[1], room, x.shape[3])
        copy[:, :, : self.longest] = x[rows.to(x.device), :, : self.longest]
        return copy

    def _put(self, number: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Offset]:
        keys, values = self._kept(self._keys, number, k), self._kept(self._values, number, v)
        start, stop = self._start, self._stop
        if isinstance(start, Tensor):
            slots = start.unsqueeze(-1) + torch.arange(k.shape[2], device=k.device)  # (b, t)
            rows = torch.arange(len(k), device=k.device).unsqueeze(-1)
            keys[rows, :, slots] = k.transpose(1, 2)  # two indices apart put their axes first: (b, t, h, d)
            values[rows, :, slots] = v.transpose(1, 2)
        else:
            keys[..., start:stop, :], values[..., start:stop, :] = k, v
            if not start:
                return k, v, 0
        return keys[..., :stop, :], values[..., :stop, :], start

    def _kept(self, of: list[Tensor | None], number: int, x: Tensor) -> Tensor:
        """Where keys or values of a layer are kept."""
        kept = of[number]
        if kept is None:
            kept = of[number] = x.new_empty(*x.shape[:-2], self.room, x.shape[-1])
        if kept.shape[:-2] != x.shape[:-2]:
            raise ShapeError(f"the cache holds keys of (b, h) = {tuple(kept.shape[:-2])}, got {tuple(x.shape[:-2])}.")
        return kept


def picked(lengths: Offset, rows: Tensor) -> Offset:
    """The lengths of these rows."""
    return lengths[rows.to(lengths.device)] if isinstance(lengths, Tensor) else lengths
