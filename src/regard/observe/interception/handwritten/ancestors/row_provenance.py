"""Which axes of a tensor are rows of what a layer projected, found back through views, permutations, joins and products.

A layer has features in the last axis of its result, a convolution in the second one. A product with weights keeps the rows of
what it multiplies, also where each head has a matrix of its own, as that which queries of latent attention absorb.
"""

import math
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from regard.observe.interception.folded_heads import SAME_AXES, find_joining_axis, find_order
from regard.observe.interception.function_roles import Role, infer_role, strip_affixes
from regard.observe.interception.handwritten.ancestors.ancestor_search import CONVERSIONS, CONVOLUTIONS, REPEATS, TensorRef
from regard.observe.interception.handwritten.ancestors.rearrange_patterns import find_axis_sizes, parse_axes
from regard.observe.interception.handwritten.ancestors.token_factors import find_largest, is_layer, label_factors
from regard.observe.interception.handwritten.products.labelled_product import label_terms
from regard.observe.interception.handwritten.products.tensor_axes import Axes, AxisTable, Dims
from regard.observe.interception.head_counts import find_head_counts
from regard.observe.interception.lookups import JOINS_PARTS, PERMUTES_AXES, PRODUCTS_OF_TWO, SPLITS
from regard.observe.interception.provenance import TOKEN, ModuleFrame, Operation

STEPS = 40  # functions that are followed back, at most
BY_ENTRY = (Role.NONLINEAR, Role.POWER, Role.ADD, Role.MULTIPLY)
SAME_ENTRIES = SAME_AXES | CONVERSIONS | REPEATS | {"masked_fill", "where", "normalize", "layer_norm", "rms_norm", "dropout"}


class RowAxes(NamedTuple):
    """The axes of a tensor that are rows of the projection it was made of, and those of them that are a batch."""

    rows: set[int]
    batch: set[int]
    groups: tuple[set[int], ...] = ()  # the rows of each dimension of the projection


class Place(NamedTuple):
    """A tensor and the axes of its dimensions, on the way back to the layer that projected it."""

    tensor: TensorRef
    dims: Dims


class RowSearch:
    """The search for the rows of a tensor. Axes that were cut out of others are known by these.

    With some axes that are tokens, and others that are batch or heads, arguments of the model show their rows too.
    """

    def __init__(self, table: AxisTable, tokens: Axes = (), others: Axes = ()) -> None:
        self.table, self.tokens, self.others = table, tokens, others
        self.uncut: dict[int, Axes] = {}  # what an axis of the whole stands for, by its number
        self.joined = set[int]()  # those of them whose other parts may have been made otherwise

    def find(self, frames: Sequence[ModuleFrame], x: Tensor, dims: Dims) -> RowAxes | None:
        """Return the axes of a tensor with axes `dims` that are rows of what a layer projected; None if they are not known.

        An axis is split in the table only if it is made of rows and features, or of a batch and tokens.
        """
        axes, before = {axis for axes in self.table.expand_dims(dims) for axis in axes}, len(self.table.parts)
        found, splits = self.search(frames, x, dims), list[tuple[int, Axes]]()
        while len(self.table.parts) > before:
            splits.append(self.table.parts.popitem())
        if found is None or mixes_tokens([list_split(axes, dict(splits)) for axes in self.table.expand_dims(dims)], found):
            return None
        rows = RowAxes(set(), set())
        for axis in axes:
            self.settle(axis, dict(splits), found, rows)
        return rows

    def settle(self, axis: int, splits: dict[int, Axes], found: RowAxes, rows: RowAxes) -> None:
        """Add an axis to some rows if its parts are among those that were found, and split it if only some are."""
        kinds = {(part in found.rows, part in found.batch) for part in list_split((axis,), splits)}
        if len(kinds) > 1:
            self.table.parts[axis] = splits[axis]
            for part in splits[axis]:
                self.settle(part, splits, found, rows)
            return
        ((is_row, is_batch),) = kinds
        rows.rows.update([axis] * is_row)
        rows.batch.update([axis] * is_batch)

    def search(self, frames: Sequence[ModuleFrame], x: Tensor, dims: Dims) -> RowAxes | None:
        """Go back from a tensor to the layer that projected it, and return its rows."""
        place = Place(weakref.ref(x), self.table.expand_dims(dims))
        for frame in reversed(frames):
            for _ in range(STEPS):
                makers = list_makers(frame, place.tensor)
                if not makers:
                    break  # an argument of the module
                found = self.find_rows_of_layer(frame, makers[-1], place.dims)
                if found is not None:
                    return found
                before = self.step_back(frame, makers[-1], place.dims)
                if before is None:
                    return None
                place = before
        return self.find_rows_of_argument(place.dims)

    def find_rows_of_argument(self, dims: Dims) -> RowAxes | None:
        """Return the rows of an argument (t, d), (b, h, t, d) or (b, t, h, d), or (b, t, d) that is cut into windows of tokens.

        Where heads are stated, the first dimension of three may hold them. None for other arguments.
        """
        if len(dims) not in (2, 3, 4):
            return None
        tokens, others = ({*self.table.expand_axes(axes)} for axes in (self.tokens, self.others))
        *outer, features = [{*self.table.expand_axes(list_split(axes, self.uncut))} for axes in dims]
        if not (tokens | others).isdisjoint(features):
            return None
        if len(dims) == 2:
            return self.collect([dims[0]]) if outer[0] & others and outer[0] <= tokens | others else None
        places = [n for n, axes in enumerate(outer) if n and tokens & axes]
        if others and not places:
            places = [n for n, axes in enumerate(outer) if n and axes.isdisjoint(others)]  # of which one token was cut out
        rest = [axes for n, axes in enumerate(outer) if n not in places]
        if len(places) != 1 or not set().union(*rest) <= others:
            return None
        is_cut = len(dims) == 3 and not outer[1] <= tokens and not find_head_counts()
        return self.collect([dims[0], dims[places[0]]]) if is_cut or len(dims) == 4 else None

    def find_rows_of_layer(self, frame: ModuleFrame, maker: Operation, dims: Dims) -> RowAxes | None:
        """Return the rows of the result of a layer with axes `dims`; None if the operation is none."""
        if len(dims) < 2:
            return None
        if maker.name == "linear" or (maker.child is not None and is_layer(maker)):
            return self.collect([*dims[:-1]])
        is_convolution = issubclass(maker.child, CONVOLUTIONS) if maker.child else infer_role(maker.name) is Role.CONVOLUTION
        if is_convolution:
            return self.collect([dims[0], *dims[2:]])
        labels = label_factors(frame, maker) if maker.child is None else None
        if labels is None or len(labels.result) != len(dims) or {*labels.tokens} & {*labels.weights} & {*labels.result}:
            return None
        return self.collect([axes for label, axes in zip(labels.result, dims, strict=True) if label in labels.tokens])

    def collect(self, rows: list[Axes]) -> RowAxes | None:
        """Return axes of rows, of which the first is a batch if there are several, as axes of the tensor of the search.

        None if an axis that others were cut out of is made of rows and features, or rows were joined.
        """
        groups = [{*self.table.expand_axes(axes)} for axes in rows]
        for whole, axes in reversed(self.uncut.items()):
            parts, own = {*self.table.expand_axes((whole,))}, {*self.table.expand_axes(axes)}
            for group in groups:
                if group & parts and (not group >= parts or whole in self.joined):
                    return None
                if group & parts:
                    group |= own
        return RowAxes(set().union(*groups), groups[0] if len(groups) > 1 else set(), tuple(groups))

    def step_back(self, frame: ModuleFrame, maker: Operation, dims: Dims) -> Place | None:
        """Return a tensor that an operation was given and the axes of its dimensions, from those of the result."""
        name, core = maker.name, strip_affixes(maker.name)
        if not maker.given:
            return None
        largest = find_largest(frame, maker)
        if maker.child is not None:
            shapes = maker.shapes
            if shapes is not None and shapes.how is not None:
                return self.step_back_pattern(maker, dims)
            return None if shapes is None or shapes.given[0] != shapes.result else Place(maker.given[0], dims)
        if name in JOINS_PARTS and maker.layout is not None:
            return self.step_back_join(frame, maker, dims)
        if maker.layout is not None:
            before, after, args, kwargs = maker.layout
            fitted = fit_dims(dims, len(after))
            if fitted is None or 0 in before:
                return None
            if name in SPLITS:
                return Place(largest, self.widen(fitted, before))
            if name in PERMUTES_AXES | {"mT"}:
                order = find_order(name, before, args, kwargs)
                return Place(largest, tuple(axes for _, axes in sorted(zip(order, fitted, strict=True))))
            regrouped = self.table.regroup(fitted, before)
            return None if regrouped is None else Place(largest, regrouped)
        if name == "__getitem__" and maker.shapes is not None:
            return self.step_back_slice(maker, dims)
        if maker.along is not None:
            axis, shape = maker.along
            fitted = fit_dims(dims, len(shape) - 1)
            picked = self.table.add_axis(shape[axis])
            return None if fitted is None else Place(largest, (*fitted[:axis], picked, *fitted[axis:]))
        if core == "pad":
            shape = () if maker.shapes is None or 0 in maker.shapes.result else maker.shapes.given[0]
            hides_axis = any(size == 1 and axes for axes, size in zip(dims, shape, strict=False))  # one entry shows no axis
            return None if hides_axis or 0 in shape or len(shape) != len(dims) else Place(largest, self.widen(dims, shape))
        if core in ("view_as_real", "view_as_complex"):
            pair = self.table.add_axis(2)
            return Place(largest, dims[:-1] if core == "view_as_real" else (*dims, pair))
        if name == "einsum" and len(maker.given) == 1:
            return self.step_back_permutation(maker, dims)
        if core in PRODUCTS_OF_TWO or name in PRODUCTS_OF_TWO:
            return self.step_back_product(frame, maker, dims)
        if infer_role(name) not in BY_ENTRY and core not in SAME_ENTRIES:
            return None
        size = math.prod(self.table.get_sizes([axis for axes in self.table.expand_dims(dims) for axis in axes]))
        return Place(largest, dims) if max(maker.sizes) == size else None

    def widen(self, dims: Dims, shape: Sequence[int]) -> Dims:
        """Return the axes of what dimensions were cut out of, with a new axis where the size was another one."""
        return tuple(self.widen_axes(axes, size) for axes, size in zip(dims, shape, strict=True))

    def widen_axes(self, axes: Axes, size: int) -> Axes:
        """Return axes, or a new one of a size that stands for them, if theirs is another one."""
        if math.prod(self.table.get_sizes(self.table.expand_axes(axes))) == size:
            return axes
        whole = self.table.add_axis(size)
        self.uncut |= dict.fromkeys(whole, axes)
        return whole

    def step_back_join(self, frame: ModuleFrame, maker: Operation, dims: Dims) -> Place | None:
        """Return the last of the tensors of tokens that were joined, as the new one behind a cache."""
        assert maker.layout is not None
        _, after, *_ = maker.layout
        axis, fitted = find_joining_axis(maker.layout), fit_dims(dims, len(after))
        given = enumerate(zip(maker.given, maker.sizes, strict=True))
        tokens = [n for n, (one, size) in given if size and frame.find_contents(one) == TOKEN]
        if fitted is None or 0 in after or not tokens:
            return None
        if maker.name == "stack":
            return Place(maker.given[tokens[-1]], (*fitted[:axis], *fitted[axis + 1 :]))
        shape = [*after]
        shape[axis] = maker.sizes[tokens[-1]] * after[axis] // math.prod(after)
        whole = self.widen(fitted, shape)
        if fitted[axis] and not whole[axis]:
            return None  # one number, which does not show what the others are
        self.joined |= {*whole[axis]} - {*fitted[axis]}
        return Place(maker.given[tokens[-1]], whole)

    def step_back_slice(self, maker: Operation, dims: Dims) -> Place | None:
        """Return the tensor that slices, numbers and new axes cut, with the axes of its dimensions."""
        assert maker.shapes is not None
        (shape, *_), result, index = maker.shapes
        entries = index if isinstance(index, tuple) else (index,)
        count = len(shape) - sum(one is not None and one is not Ellipsis for one in entries)
        place = next((n for n, one in enumerate(entries) if one is Ellipsis), len(entries))
        entries = (*entries[:place], *[slice(None)] * count, *entries[place + 1 :])
        left, found, sizes = list(fit_dims(dims, len(result)) or ()), list[Axes](), iter(shape)
        if len(left) != len(result):
            return None
        for one in entries:
            if one is None:
                left.pop(0)
            else:
                size = next(sizes)
                found.append(self.table.add_axis(size) if type(one) is int else self.widen_axes(left.pop(0), size))
        return Place(maker.given[0], tuple(found))

    def step_back_pattern(self, maker: Operation, dims: Dims) -> Place | None:
        """Return the tensor that einops's layer Rearrange was given, and the axes of its dimensions."""
        assert maker.shapes is not None
        (shape, *_), _, (pattern, lengths) = maker.shapes
        left, right = pattern.split("->")
        others = len(shape) - len(parse_axes(left, 0))
        before, after = parse_axes(left, others), parse_axes(right, others)
        sizes = find_axis_sizes(before, shape, lengths)
        order = [name for group in after for name in group]
        if sizes is None or not sizes.keys() >= {*order}:
            return None
        single = self.table.regroup(dims, [sizes[name] for name in order])
        if single is None:
            return None
        axes = dict(zip(order, single, strict=True))
        return Place(maker.given[0], tuple(tuple(axis for name in group for axis in axes.get(name, ())) for group in before))

    def step_back_permutation(self, maker: Operation, dims: Dims) -> Place | None:
        """Return the tensor whose axes an einsum permuted, and the axes of its dimensions."""
        if maker.shapes is None or type(maker.shapes.how) is not str:
            return None
        shape = maker.shapes.given[-1]
        labels, result = label_terms(maker.shapes.how, [torch.empty(shape, device="meta")])
        if not labels or len(result) != len(dims):
            return None
        axes = dict(zip(result, dims, strict=True))
        own = zip(labels[0], shape, strict=True)
        return Place(maker.given[0], tuple(axes[one] if one in axes else self.table.add_axis(size) for one, size in own))

    def step_back_product(self, frame: ModuleFrame, maker: Operation, dims: Dims) -> Place | None:
        """Return the tokens that a product multiplies with weights, with the axes that are theirs."""
        labels = label_factors(frame, maker)
        if labels is None or len(labels.result) != len(dims):
            return None
        axes = dict(zip(labels.result, dims, strict=True))
        own = zip(labels.tokens, labels.shape, strict=True)
        found = tuple(axes[label] if label in axes else self.table.add_axis(size) for label, size in own)
        return Place(maker.given[labels.place], self.widen(found, labels.shape))


def list_split(axes: Axes, splits: dict[int, Axes]) -> Axes:
    """Return axes with those that are split replaced by their parts."""
    while not splits.keys().isdisjoint(axes):
        axes = tuple(part for one in axes for part in splits.get(one, (one,)))
    return axes


def mixes_tokens(dims: Sequence[Axes], found: RowAxes) -> bool:
    """Return whether the rows of one dimension of a projection are in several of a tensor, one of which has features too.

    So they are where heads are split off by a view without a transposition, a mistake: its dimensions are what it means them
    to be.
    """
    for group in found.groups:
        own = [{*axes} for axes in dims if group.intersection(axes)]
        if len(own) > 1 and not set().union(*own) <= found.rows:
            return True
    return False


def list_makers(frame: ModuleFrame, x: TensorRef) -> list[Operation]:
    """Return the operations of a module that made a tensor, without those that wrote into it."""
    return [maker for maker in frame.find_makers(x) if not (maker.given and maker.given[0] is x)]


def fit_dims(dims: Dims, rank: int) -> Dims | None:
    """Return dimensions as those of a tensor with a number of axes, without or with further ones of size 1 before them."""
    extra = len(dims) - rank
    if extra <= 0:
        return ((),) * -extra + dims
    return None if any(dims[:extra]) else dims[extra:]
