"""Cache: the keys and values of the tokens a model has read, so that each is computed once.

Every sequence has a row, and the key of its token number n is in slot n of that row. A query at position p sees the slots up
to p: the mask hides slots that are not written yet or were cropped, so nothing is ever cleared.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from regard.errors import ConfigError, ShapeError
from regard.mechanism.mask_algebra import Offset


class Cache:
    """Keys and values of up to `room` tokens a row, (b, h, room, d) a layer, allocated once and written in place.

    A model calls three methods: `extend`, for the positions of the next tokens; `layer`, for the past of an attention layer,
    which takes new keys and values and returns all of them and the offset of the new queries; and `select_wanted`, for the
    vectors whose logits are wanted. The number and the width of heads are those of the first keys given, and so is the dtype,
    unless the model says in which dtype to store them.
    """

    def __init__(self, layers: int, room: int) -> None:
        if layers < 1 or room < 1:
            raise ConfigError(f"a cache needs at least one layer and room for one token, got layers={layers}, room={room}.")
        self.capacity = room
        self.lengths: Offset = 0  # tokens read: one number if all rows have as many, which is faster, else (b,)
        self.wanted: int | Tensor | None = None  # logits wanted: of the last n tokens, of one in each row (b,), or of all
        self._start: Offset = 0  # position of the first token of the current call
        self._stop = 0  # end of the longest row in the current call
        self._keys: list[Tensor | None] = [None] * layers
        self._values: list[Tensor | None] = [None] * layers

    def extend(self, tokens: Tensor) -> Tensor:
        """Return the positions of the next tokens, (t,) or (b, t), and count them as read."""
        t = tokens.shape[-1]
        start, steps = self.advance(t), torch.arange(t, device=tokens.device)
        return steps + (start.unsqueeze(-1) if isinstance(start, Tensor) else start)

    def advance(self, t: int) -> Offset:
        """Count t more tokens of each row as read; return the position of the first of them."""
        stop = self.longest + t
        if stop > self.capacity:
            raise ConfigError(
                f"the cache has room for {self.capacity} tokens: it holds {self.longest}, and {t} more were given."
            )
        self._start, self._stop = self.lengths, stop
        self.lengths = self.lengths + t
        return self._start

    def layer(self, number: int, dtype: torch.dtype | None = None) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Offset]]:
        """Return the past of a layer: a function from new keys and values to all of them and the first new query's position.

        They are stored in this dtype, and returned as they are stored, in their own dtype or that of the cache, the wider one;
        the first ones in their own, unless they are rounded.
        """
        return partial(self._append, number, dtype)

    def select_wanted(self, x: Tensor) -> Tensor:
        """Return the vectors, of (b, t, c), whose logits are wanted: for a prompt those of its last token only."""
        if isinstance(self.wanted, Tensor):
            return x[torch.arange(len(x), device=x.device), self.wanted].unsqueeze(1)
        return x if self.wanted is None else x[..., x.shape[-2] - self.wanted :, :]

    @property
    def longest(self) -> int:
        """The number of tokens of the longest row."""
        return int(self.lengths.max()) if isinstance(self.lengths, Tensor) else self.lengths

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of the keys of the first layer, None before the first write."""
        return None if self._keys[0] is None else self._keys[0].dtype

    @property
    def keys_and_values(self) -> list[tuple[Tensor | None, Tensor | None]]:
        """The keys and values of each layer, (b, h, room, d), None before the first write; unused slots are not cleared."""
        return list(zip(self._keys, self._values, strict=True))

    def crop(self, lengths: Offset) -> None:
        """Drop all but the first `lengths` tokens of each row, or of all."""
        if isinstance(lengths, Tensor) and bool((lengths == lengths[0]).all()):
            lengths = int(lengths[0])
        longer = torch.as_tensor(lengths) > torch.as_tensor(self.lengths)
        if longer.any():
            raise ConfigError(f"a cache of {self.lengths} tokens cannot be cropped to {lengths}.")
        self.lengths = lengths

    def fork(self, rows: int | Tensor, capacity: int | None = None) -> "Cache":
        """Copy these rows, or row 0 this many times, into a new cache, without computing anything again."""
        other = Cache(len(self._keys), self.capacity if capacity is None else capacity)
        if self.longest > other.capacity:
            raise ConfigError(f"the cache holds {self.longest} tokens, but the fork has room for {other.capacity}.")
        index = torch.zeros(rows, dtype=torch.int64) if isinstance(rows, int) else rows
        other.lengths = select_lengths(self.lengths, index)
        other._keys = [self._copy_rows(x, index, other.capacity) for x in self._keys]
        other._values = [self._copy_rows(x, index, other.capacity) for x in self._values]
        return other

    def reorder(self, rows: Tensor) -> None:
        """Replace the rows by others, the same number: beams that survived."""
        used = self.longest
        self.lengths = select_lengths(self.lengths, rows)
        for x in (*self._keys, *self._values):
            if x is not None:
                x[:, :, :used] = x[rows.to(x.device), :, :used]

    def _copy_rows(self, x: Tensor | None, rows: Tensor, room: int) -> Tensor | None:
        if x is None:
            return None
        copy = x.new_empty(len(rows), x.shape[1], room, x.shape[3])
        copy[:, :, : self.longest] = x[rows.to(x.device), :, : self.longest]
        return copy

    def _append(self, number: int, dtype: torch.dtype | None, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Offset]:
        keys, values = self._get_buffer(self._keys, number, k, dtype), self._get_buffer(self._values, number, v, dtype)
        start, stop, wide = self._start, self._stop, torch.promote_types(keys.dtype, k.dtype)
        if isinstance(start, Tensor):
            slots = start.unsqueeze(-1) + torch.arange(k.shape[2], device=k.device)  # (b, t)
            rows = torch.arange(len(k), device=k.device).unsqueeze(-1)
            keys[rows, :, slots] = k.transpose(1, 2).to(keys.dtype)  # separated indices put their axes first: (b, t, h, d)
            values[rows, :, slots] = v.transpose(1, 2).to(values.dtype)
        else:
            keys[..., start:stop, :], values[..., start:stop, :] = k, v
            if not start and keys.dtype == wide:  # storing them has not rounded them
                return k, v, 0
        return keys[..., :stop, :].to(wide), values[..., :stop, :].to(wide), start

    def _get_buffer(self, buffers: list[Tensor | None], number: int, x: Tensor, dtype: torch.dtype | None) -> Tensor:
        """Return the buffer of a layer's keys or values, allocated if needed."""
        buffer = buffers[number]
        if buffer is None:
            buffer = buffers[number] = x.new_empty(*x.shape[:-2], self.capacity, x.shape[-1], dtype=dtype)
        if buffer.shape[:-2] != x.shape[:-2]:
            raise ShapeError(f"the cache holds keys of (b, h) = {tuple(buffer.shape[:-2])}, got {tuple(x.shape[:-2])}.")
        return buffer


def select_lengths(lengths: Offset, rows: Tensor) -> Offset:
    """Return the lengths of these rows."""
    return lengths[rows.to(lengths.device)] if isinstance(lengths, Tensor) else lengths
