"""What was computed of the positions of pixels in a forward: a later layer that does the same finds it again."""

from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar, overload

import torch
from torch import Tensor

Computed = TypeVar("Computed")
COMPARED = 16  # positions of a shape, the latest, among which equal ones are looked for


class PositionCache:
    """The positions of one forward, each once, and what was computed of them by their ids."""

    def __init__(self) -> None:
        self.distinct: dict[torch.Size, list[Tensor]] = {}  # kept alive, so that an id is that of the same positions
        self.ids: set[int] = set()
        self.computed: dict[Hashable, Any] = {}

    def clear(self) -> None:
        """Forget all."""
        self.distinct.clear()
        self.ids.clear()
        self.computed.clear()

    @overload
    def share(self, positions: Tensor) -> Tensor: ...

    @overload
    def share(self, positions: None) -> None: ...

    def share(self, positions: Tensor | None) -> Tensor | None:
        """Return earlier positions of the same layout and numbers if there are any, else these."""
        if positions is None or id(positions) in self.ids:
            return positions
        others = self.distinct.setdefault(positions.shape, [])
        for one in others[-COMPARED:]:
            if one.stride() == positions.stride() and torch.equal(one, positions):
                return one
        others.append(positions)
        self.ids.add(id(positions))
        return positions

    def compute_once(self, key: Hashable, compute: Callable[[], Computed]) -> Computed:
        """Return what `compute` returns, computed once for a key. The key has the ids of positions that were shared."""
        if key not in self.computed:
            self.computed[key] = compute()
        found: Computed = self.computed[key]
        return found


def describe_arguments(x: Any, known: Mapping[int, tuple[Tensor, Tensor]], reads_numbers: bool) -> Hashable:
    """Return what decides the positions of a function's results among its arguments x; `known` are tensors with positions.

    Raises TypeError if the numbers of a tensor do: `reads_numbers` states that those of indices count.
    """
    if isinstance(x, Tensor):
        if id(x) in known:
            return x.shape, id(known[id(x)][1])
        if reads_numbers and not x.is_floating_point():
            raise TypeError("an index decides what is moved")
        return x.shape, x.is_floating_point()
    if isinstance(x, list | tuple):
        return type(x), *(describe_arguments(one, known, reads_numbers) for one in x)
    if isinstance(x, dict):
        return dict, *((key, describe_arguments(value, known, reads_numbers)) for key, value in x.items())
    if isinstance(x, slice):
        return slice, *(one if one is None else int(one) for one in (x.start, x.stop, x.step))
    hash(x)
    return type(x), x
