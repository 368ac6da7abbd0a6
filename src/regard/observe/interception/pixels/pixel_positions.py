"""Positions of pixels: where in the images the entries of each tensor of a forward come from.

A position is a complex number, row + column * i, counted from FIRST; the images of a batch lie below each other, with as many
rows between them. 0 is none. Functions that move entries are repeated on positions, layers that sum over entries take the
mean, and what attention writes for a query stays at its position.
"""

import operator
import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from regard.observe.interception.attention_call import AttentionCall, CallAdapter
from regard.observe.interception.function_roles import Role, infer_role, strip_affixes
from regard.observe.interception.handwritten.products.score_form import CHOOSES_BY_VALUE, MOVERS, VIEWS
from regard.observe.interception.handwritten.scores.entry_sources import FRACTION
from regard.observe.interception.handwritten.scores.moved_entries import is_replayed, replay_function
from regard.observe.interception.pixels.position_cache import PositionCache, describe_arguments
from regard.observe.interception.pixels.position_lattice import (
    CPU,
    FIRST,
    READERS,
    SAME_POSITION,
    average,
    scale_positions,
    stride_positions,
)
from regard.observe.interception.pixels.strided_views import Layout, view_by_strides
from regard.observe.interception.provenance import FRESH, is_in_place
from regard.observe.interception.tensor_arguments import PLAIN, find_tensors, list_entries

LAYOUTS = 256  # of views, cached in a forward
MAX_PIXELS = 2**22  # of all images of a forward: the positions of more are not followed, which take 16 bytes each
REDUCES = {"mean", "sum", "amax", "amin", "max"}  # over dimensions that are given
MIXING = {Role.PRODUCT, Role.DISTANCE, Role.SUM, Role.CONVOLUTION, Role.ONE_HOT, Role.SOFTMAX, Role.LOG_SOFTMAX}
REORDERS = re.compile("scatter|sort|cum|fft|linalg|sample|shuffle")  # functions of one shape that are not of each entry
STRIDED = (nn.Conv2d, nn.MaxPool2d, nn.AvgPool2d)

Known = dict[int, tuple[Tensor, Tensor]]  # tensors and their positions, by the id of the tensor
EXACT = 2**20  # numbers below are exact with a fraction in float32


class StoredPositions(NamedTuple):
    """The positions of the entries of a tensor, of size 1 along dimensions that have the same, and the tensor's layout."""

    storage: StorageWeakRef
    layout: tuple[Any, ...]
    positions: Tensor


class PixelPositions:
    """The positions of the tensors of one forward, by their storage: a view has those of what it is a view of."""

    def __init__(self) -> None:
        self.stored: dict[int, StoredPositions] = {}
        self.cache = PositionCache()

    def clear(self) -> None:
        """Forget all positions."""
        self.stored.clear()
        self.cache.clear()
        locate_entries.cache_clear()

    def start(self, pixels: Tensor) -> None:
        """Start with images (..., c, height, width), unless there are too many pixels."""
        rows, columns = pixels.shape[-2:]
        if pixels.shape[:-3].numel() * rows * columns > MAX_PIXELS:
            return
        images = torch.arange(pixels.shape[:-3].numel(), device=CPU).view(*pixels.shape[:-3], 1, 1, 1)
        down = FIRST + torch.arange(rows, device=CPU)[:, None] + images * 2 * rows
        across = FIRST + torch.arange(columns, device=CPU).expand(rows, columns)
        self.put(pixels, torch.complex(*(x.double() for x in torch.broadcast_tensors(down, across))))

    def has(self, x: Tensor) -> bool:
        """Return whether a tensor, or what it is a view of, has positions."""
        return self.get_stored(x) is not None

    def get_stored(self, x: Tensor) -> StoredPositions | None:
        """Return the positions in the storage of a tensor, with the layout that they belong to."""
        if type(x) not in PLAIN or x.layout is not torch.strided:
            return None
        return self.stored.get(x.untyped_storage()._cdata)

    def find(self, x: Tensor) -> Tensor | None:
        """Return the positions of a tensor, of its shape or of size 1; None if there are none."""
        known = self.get_stored(x)
        if known is None or known.layout[-1] != x.dtype:
            return None
        layout = read_layout(x)
        if known.layout == layout:
            return known.positions
        positions, key = known.positions, ("view", id(known.positions), known.layout[:3], layout[:3])
        return self.cache.compute_once(key, lambda: self.cache.share(view_positions(positions, *key[2:])))

    def put(self, x: Tensor, positions: Tensor | None) -> None:
        """Store the positions of a tensor, or forget them if they are None or have other dimensions."""
        storage = x.untyped_storage()
        if positions is None or positions.dim() != x.dim():
            self.stored.pop(storage._cdata, None)
            return
        self.stored[storage._cdata] = StoredPositions(StorageWeakRef(storage), read_layout(x), self.cache.share(positions))

    def follow_function(self, func: Any, name: str, args: Any, kwargs: Any, outputs: Any) -> None:
        """Store the positions of the results of a function."""
        results = [outputs] if isinstance(outputs, Tensor) else [y for y in list_entries(outputs) if isinstance(y, Tensor)]
        writes = is_in_place(name) or (bool(kwargs) and kwargs.get("out") is not None)
        new = results if writes else [y for y in results if not self.has(y)]  # views have those of what they are views of
        if not new:
            return
        known = {id(x): (x, own) for x in find_tensors(args, kwargs) if (own := self.find(x)) is not None}
        if not known:
            for y in new:
                self.put(y, None)  # of another dtype than before, for one
            return
        if strip_affixes(name) in VIEWS and len(results) == 1 and id(args[0]) in known:
            self.put_copy(*known[id(args[0])], results[0])
            return
        found = self.find_results(func, name, args, kwargs, known, results)
        for y, positions in zip(results, found, strict=True):
            is_part = writes and self.has(y) and self.stored[y.untyped_storage()._cdata].layout != read_layout(y)
            if any(y is one for one in new):
                self.put(y, None if is_part else positions)

    def find_results(
        self, func: Any, name: str, args: Any, kwargs: Any, known: Known, results: list[Tensor]
    ) -> list[Tensor | None]:
        """Return what `compute_positions` does, computed once for arguments alike: layers of a stage move the same patches."""

        def compute() -> list[Tensor | None]:
            found = self.compute_positions(func, name, args, kwargs, known, results)
            return [self.cache.share(positions) for positions in found]

        try:
            described = describe_arguments((*args, kwargs), known, is_replayed(name))
        except TypeError:
            return compute()
        return self.cache.compute_once((func, name, described, *(y.shape for y in results)), compute)

    def compute_positions(
        self, func: Any, name: str, args: Any, kwargs: Any, known: Known, results: list[Tensor]
    ) -> list[Tensor | None]:
        """Return the positions of the results of a function of tensors with positions, which are given by id."""
        core, role, first = strip_affixes(name), infer_role(name), known.get(id(args[0])) if args else None
        nothing: list[Tensor | None] = [None] * len(results)
        if is_replayed(name):
            return replay_positions(func, name, args, kwargs, known, results)
        if first is not None and core in REDUCES:
            dims = kwargs.get("dim", args[1] if len(args) > 1 else None)
            keeps = kwargs.get("keepdim", args[2] if len(args) > 2 else False)
            if isinstance(dims, int | tuple | list):
                return [average(first[1], dims, bool(keeps)), *nothing[1:]]
            return nothing
        if first is not None and core in ("linear", "matmul") and len(args) > 1 and id(args[1]) not in known:
            return [average(first[1], -1, True)] if args[1].dim() == 2 else nothing
        if first is not None and core == "interpolate" and not kwargs.get("align_corners"):
            return [scale_positions(*first, results[0])]
        if first is not None and core in READERS:
            return [stride_positions(*first, results[0], *READERS[core](*args, **kwargs))]
        if role in MIXING or core in MOVERS | CHOOSES_BY_VALUE | FRESH or REORDERS.search(core) or len(results) > 1:
            return nothing
        same = [positions for x, positions in known.values() if x.shape == results[0].shape]
        return [join_positions(same)]

    def follow_module(self, module: nn.Module, x: Tensor, y: Any) -> None:
        """Store the positions of the result of a module of torch without parts, whose functions were not seen."""
        positions = self.find(x)
        if positions is None or not isinstance(y, Tensor) or self.has(y):
            return
        if isinstance(module, nn.Linear):
            self.put(y, average(positions, -1, True))
        elif isinstance(module, STRIDED) and x.dim() == 4:
            shape = (module.kernel_size, module.stride, module.padding, getattr(module, "dilation", 1))
            self.put(y, stride_positions(x, positions, y, *shape))
        elif isinstance(module, nn.Upsample) and not module.align_corners:
            self.put(y, scale_positions(x, positions, y))
        elif x.shape == y.shape:
            self.put(y, positions)

    def find_tokens(self, x: Tensor) -> Tensor | None:
        """Return the positions (b, t) of the tokens of queries or keys (b, h, t, d); None if they are not one for each."""
        positions = self.find(x)
        if positions is None:
            return None
        key = "tokens", id(positions), x.shape[0], x.shape[2]
        return self.cache.compute_once(key, lambda: self.cache.share(select_tokens(positions, *key[2:])))

    def put_copy(self, x: Tensor, positions: Tensor, y: Tensor) -> None:
        """Store the positions of y, a contiguous copy of x in another shape, with the dimensions of x."""
        storage = y.untyped_storage()
        layout = *contiguous_layout(x.shape, int(y.storage_offset())), y.dtype
        self.stored[storage._cdata] = StoredPositions(StorageWeakRef(storage), layout, positions)

    def follow_copy(self, x: Tensor, y: Tensor) -> None:
        """Store the positions of y, which is x in another shape."""
        if not self.has(y) and (positions := self.find(x)) is not None:
            self.put_copy(x, positions, y)

    def follow_tokens(self, x: Tensor, *results: Tensor) -> None:
        """Store the positions of what was made of each of the tokens x (b, t, c): vectors (b, t, c) or heads (b, h, t, d)."""
        positions = self.find(x)
        if positions is not None:
            tokens = average(positions, -1, True)
            for y in results:
                self.put(y, tokens if y.dim() == 3 else tokens[:, None])

    def follow_call(self, call: AttentionCall, adapter: CallAdapter, result: Any) -> None:
        """Store the positions of the result of a call of attention: those of its queries."""
        tokens = self.find_tokens(call.q)
        context = None if tokens is None or adapter.context is None else adapter.context(result)
        if tokens is not None and context is not None:
            self.put(context, tokens[:, None, :, None])  # a view of the result, unless its layout is unusual


def read_layout(x: Tensor) -> tuple[Any, ...]:
    """Return what says where each entry of a tensor is in its storage."""
    return tuple(x.shape), x.stride(), x.storage_offset(), x.dtype


def contiguous_layout(shape: Sequence[int], offset: int) -> Layout:
    """Return the layout of a contiguous tensor."""
    strides = accumulate(reversed(shape[1:]), operator.mul, initial=1)
    return tuple(shape), tuple(strides)[::-1] if shape else (), offset


def view_positions(positions: Tensor, layout: Layout, other: Layout) -> Tensor | None:
    """Return the positions of a view of a tensor, by the layouts of both; None if its entries are not among the tensor's."""
    found = view_by_strides(positions, layout, other)
    if found is not None:
        return found
    index = locate_entries(layout, other, tuple(size > 1 for size in positions.shape))
    return None if index is None else positions[index]


@lru_cache(LAYOUTS)
def locate_entries(layout: Layout, other: Layout, varies: tuple[bool, ...]) -> tuple[Tensor, ...] | None:
    """Return the place of each entry of a view along each dimension of the tensor, 0 where the positions are the same."""
    shape, strides, offset = layout
    owned = sorted((n for n in range(len(shape)) if shape[n] > 1), key=lambda n: -strides[n])
    if any(not strides[n] for n in owned):
        return None

    def locate(offsets: Tensor) -> dict[int, Tensor]:
        places = {}
        for n in owned:
            places[n] = offsets.div(strides[n], rounding_mode="floor")
            offsets = offsets % strides[n]
        return places | {-1: offsets}

    steps = [
        torch.arange(size, device=CPU).mul_(stride).view(-1, *[1] * (len(other[0]) - dim - 1))
        for dim, (size, stride) in enumerate(zip(*other[:2], strict=True))
    ]
    moves = [any(one.any() for n, one in locate(step).items() if n == -1 or varies[n]) for step in steps]
    for chosen in (moves, [True] * len(steps)):  # the second only if steps along dimensions without positions may carry
        total, largest = torch.full([1] * len(steps), other[2] - offset, device=CPU), dict.fromkeys(owned, 0)
        for step, is_chosen in zip(steps, chosen, strict=True):
            if is_chosen:
                total = total + step
            else:
                places = locate(step)
                largest = {n: most + int(places[n].max()) for n, most in largest.items()}
        places = locate(total)
        is_inside = all(int(places[n].max()) + largest[n] < shape[n] and int(places[n].min()) >= 0 for n in owned)
        if is_inside and not bool(places[-1].any()):
            zero = torch.zeros_like(total[(slice(1),) * total.dim()])
            return tuple(places[n] if n in places and varies[n] else zero for n in range(len(shape)))
    return None


def select_tokens(positions: Tensor, batch: int, tokens: int) -> Tensor | None:
    """Return positions (b, t) from those of queries or keys (b, h, t, d); None if heads or features differ, or all are 0."""
    positions = compress(positions)
    if positions.shape[1] != 1 or positions.shape[3] != 1 or not bool((positions != 0).any()):
        return None
    return positions[:, 0, :, 0].expand(batch, tokens)


def compress(positions: Tensor) -> Tensor:
    """Return positions with size 1 along dimensions that have the same."""
    for dim, size in enumerate(positions.shape):
        if size > 1 and not positions.stride(dim):
            positions = positions.narrow(dim, 0, 1)
    for dim in sorted(range(positions.dim()), key=lambda n: -positions.shape[n]):
        first = positions.narrow(dim, 0, 1)
        if positions.shape[dim] > 1 and torch.equal(positions.narrow(dim, 1, 1), first) and bool((positions == first).all()):
            positions = first
    return positions


def replay_positions(func: Any, name: str, args: Any, kwargs: Any, known: Known, results: list[Tensor]) -> list[Tensor | None]:
    """Return the positions of the results of a function that moves entries: it is repeated on the numbers of positions."""
    table, count = [torch.zeros(1, dtype=torch.complex128, device=CPU)], 1
    numbers = {id(x): copy_to_cpu(x) for x in find_tensors(args, kwargs) if id(x) not in known}
    total = sum(positions.numel() for _, positions in known.values())
    dtype = torch.float32 if total < EXACT else torch.float64
    for one, (x, positions) in known.items():
        numbered = torch.arange(count, count + positions.numel(), dtype=dtype, device=CPU).add_(FRACTION)
        numbers[one] = numbered.view(positions.shape).expand(x.shape)
        table.append(positions.flatten())
        count += positions.numel()
    moved = replay_function(func, name, args, kwargs, numbers, copies=True, fills=True)
    if len(moved) != len(results) or any(x.shape != y.shape for x, y in zip(moved, results, strict=True)):
        return [None] * len(results)
    every, found = torch.cat(table), []
    for y in moved:
        y = compress(y.nan_to_num(0.0))
        places = y.floor()
        found.append(every[torch.where(y - places == FRACTION, places, 0).long()])  # else written by the function
    return [*found]


def copy_to_cpu(x: Tensor) -> Tensor:
    """Return a tensor on the CPU: NaN in place of floating-point numbers, others as they are."""
    return torch.full((), torch.nan, device=CPU).expand(x.shape) if x.is_floating_point() else x.to(CPU)


def join_positions(found: list[Tensor]) -> Tensor | None:
    """Return the mean of the positions of tensors of one shape; None without tensors, or if some are of other patches.

    Branches whose strides place the same patch otherwise, by a padding or an even side of a kernel, are up to half of it apart.
    """
    if not found:
        return None
    joined = found[0]
    for one in found[1:]:
        if one.shape != joined.shape or not torch.equal(one, joined):
            apart, both = (one - joined).abs(), (one != 0) & (joined != 0)
            if bool((both & (apart > find_spacing(joined) / 2 + SAME_POSITION)).any()):
                return None
            joined = torch.where(both, (one + joined) / 2, 0)
    return joined


def find_spacing(positions: Tensor) -> float:
    """Return the least distance of positions that follow each other along a dimension; 0 if all are the same."""
    steps = [positions.narrow(dim, 1, 1) - positions.narrow(dim, 0, 1) for dim, n in enumerate(positions.shape) if n > 1]
    distances = torch.cat([step[step != 0].abs().flatten() for step in steps]) if steps else positions.real.flatten()[:0]
    return float(distances.min()) if distances.numel() else 0.0
