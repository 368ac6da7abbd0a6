"""Linear attention with a head for each channel: keys times values, entry by entry, are summed and multiplied by queries.

``o_i = q_i Σ_j k_j v_j``, as in Hydra attention (https://arxiv.org/abs/2209.07484). Keys may be a softmax over the
tokens, as in AFT-Simple (https://arxiv.org/abs/2105.14103). Layers make queries, keys and values, and the sum is over tokens,
not over features.
"""

import math
import weakref
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from regard.observe.interception.function_roles import strip_affixes
from regard.observe.interception.handwritten.ancestor_search import find_projection, has_features_last
from regard.observe.interception.handwritten.edge_softmax import skip_layouts
from regard.observe.interception.handwritten.labelled_product import LabelledProduct, label_entries, label_sum
from regard.observe.interception.handwritten.linear_attention import ChainRoles, list_axes
from regard.observe.interception.handwritten.score_form import PRODUCTS, start_form
from regard.observe.interception.handwritten.tensor_axes import AxisTable, Dims
from regard.observe.interception.handwritten.traces import Trace, TraceKind
from regard.observe.interception.provenance import TOKEN, ModuleFrame
from regard.observe.interception.thread_state import drop_expanded_axes

Sums = dict[int, tuple["weakref.ref[Tensor]", LabelledProduct]]  # by the id of the weak reference


class GatedSums:
    """The sums over tokens of keys times values in the modules that run."""

    def __init__(self) -> None:
        self.weighted = WeakTensorKeyDictionary()  # products of a softmax with values, by the result
        self.sums: weakref.WeakKeyDictionary[ModuleFrame, Sums] = weakref.WeakKeyDictionary()

    def clear(self) -> None:
        """Forget all sums."""
        self.weighted.clear()
        self.sums.clear()

    def add_weighted(self, name: str, args: Any, y: Tensor) -> None:
        """Add the product y of a softmax with values, entry by entry: nothing else may hold the softmax until it is summed."""
        if strip_affixes(name) in PRODUCTS and len(args) == 2 and args[0].shape == args[1].shape:
            self.weighted[y] = label_entries(*args)

    def add_sum(self, frames: list[ModuleFrame], name: str, args: Any, kwargs: Any, y: Tensor) -> None:
        """Add y if it is the sum over tokens of keys times values."""
        if strip_affixes(name) not in ("sum", "mean") or not isinstance(args[0], Tensor) or args[0].is_nested:
            return
        frame = frames[-1]
        weighted = self.weighted.get(args[0]) if len(self.weighted) else None
        product = weighted or find_product(frame, args[0])
        summed = None if product is None else label_sum(product, name, args, kwargs)
        if summed is None or not summed.sums_several() or not sums_tokens(frames, summed):
            return
        if weighted is None and any(find_projection(frames, x) is None for x in summed.operands):
            return  # a mask
        own = weakref.ref(y)
        self.sums.setdefault(frame, {})[id(own)] = own, summed

    def find_roles(
        self, frames: list[ModuleFrame], table: AxisTable, name: str, args: Any, y: Tensor
    ) -> tuple[ChainRoles, Trace, LabelledProduct] | None:
        """Return the roles of queries, keys and values if y is queries times a sum of keys times values, with its product."""
        if strip_affixes(name) not in PRODUCTS or len(args) != 2 or not all(isinstance(x, Tensor) for x in args):
            return None
        for x, q in (args, args[::-1]):
            summed, own = self.find_sum(frames[-1], x), drop_expanded_axes(x.detach())
            if summed is None or q.numel() < y.numel() or own.numel() == y.numel() or any(q is one for one in summed.operands):
                continue
            if find_projection(frames, q) is None:
                continue
            form = start_form(table, summed)
            dims = place_axes(table, form.dims, own)
            if dims is None:
                continue
            product = label_entries(own, q)
            _, q_dims, y_dims = product.build_dims(table, {0: dims})
            keys = list_axes(table, form.a_dims) - list_axes(table, form.dims)
            roles = ChainRoles(q, form.a, form.b, q_dims, form.a_dims, form.b_dims, set(), keys, y_dims, is_causal=False)
            trace = Trace(weakref.ref(y), TraceKind.SCORES, True, 0, y.numel(), form=form)
            return roles, trace, product
        return None

    def find_sum(self, frame: ModuleFrame, x: Tensor) -> LabelledProduct | None:
        """Return the sum that a tensor is, in another layout or not."""
        sums, maker = self.sums.get(frame), skip_layouts(frame, weakref.ref(x))
        if maker is not None and maker.name == "__getitem__" and maker.sizes[0] == x.numel():
            maker = skip_layouts(frame, maker.given[0])
        if sums is None or maker is None or not maker.results:
            return None
        found = sums.get(id(maker.results[0]))
        return None if found is None else found[1]


def find_product(frame: ModuleFrame, x: Tensor) -> LabelledProduct | None:
    """Return the product of two other tensors of its shape, entry by entry, that a tensor is; None if it is none."""
    makers = frame.find_makers(weakref.ref(x))
    if len(makers) != 1 or strip_affixes(makers[0].name) not in PRODUCTS or len(makers[0].given) != 2:
        return None
    a, b = (one() for one in makers[0].given)
    is_product = a is not None and b is not None and a is not b and a.shape == b.shape == x.shape
    return label_entries(a, b) if is_product and a is not None and b is not None else None


def sums_tokens(frames: list[ModuleFrame], summed: LabelledProduct) -> bool:
    """Return whether a product sums its operands over as many entries as there are tokens, and not over features."""
    entries = math.prod(summed.get_size(label) for label in summed.labels[0] if label not in summed.result)
    shapes = [x.shape for frame in frames for x in frame.input_tensors if x.dim() > 1 and not x.is_nested]
    if not any(entries in (*shape[:-1], shape[2:].numel(), shape[1:-1].numel()) for shape in shapes):
        return False
    if any(frames[-1].find_contents(weakref.ref(x)) != TOKEN for x in summed.operands):
        return False
    found = [keeps_features(frames, x, summed) for x in summed.operands]
    return any(found) and False not in found


def keeps_features(frames: list[ModuleFrame], x: Tensor, summed: LabelledProduct) -> bool | None:
    """Return whether a product keeps the features that a layer has made of an operand; None if no layer is known."""
    projection = find_projection(frames, x)
    is_last = None if projection is None else has_features_last(projection)
    own = [*zip(summed.labels[summed.find_place(x)], x.stride(), x.shape, strict=True)]
    gone = [stride for label, stride, size in own if label not in summed.result and size > 1]
    kept = [stride for label, stride, size in own if label in summed.result and size > 1]
    if is_last is None or not kept:
        return None
    return min(kept) < min(gone) if is_last else max(gone) < min(kept)


def place_axes(table: AxisTable, dims: Dims, x: Tensor) -> Dims | None:
    """Return the axes of a tensor that has those of `dims` in their order and else dimensions of size 1; None if it has not."""
    axes = iter([one for one in dims if one])
    placed = tuple(next(axes, None) if size > 1 else () for size in x.shape)
    found = [one for one in placed if one is not None]
    sizes = [math.prod(table.get_sizes(table.expand_axes(one))) for one in found]
    is_same = len(found) == len(placed) and next(axes, None) is None and sizes == [*x.shape]
    return tuple(found) if is_same else None
