"""Linear attention with a head for each channel: keys times values, entry by entry, are summed and multiplied by queries.

``o_i = q_i Σ_j k_j v_j``, as in Hydra attention (https://arxiv.org/abs/2209.07484). Keys may be a softmax over the
tokens, as in AFT-Simple (https://arxiv.org/abs/2105.14103). Layers make queries, keys and values, and the sum is over tokens
of an input of a module, not over features, heads or a batch. Keys and values are held by weak references: most sums of
products are no attention. A softmax alone is held until its product with values is summed, and then as long as the sum.
"""

import math
import weakref
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from regard.observe.interception.function_roles import strip_affixes
from regard.observe.interception.handwritten.ancestor_search import TensorRef, find_projection, has_features_last
from regard.observe.interception.handwritten.edge_softmax import skip_layouts
from regard.observe.interception.handwritten.labelled_product import LabelledProduct, Labels, label_entries, label_sum
from regard.observe.interception.handwritten.linear_attention import ChainRoles, list_axes
from regard.observe.interception.handwritten.score_form import PRODUCTS, start_form
from regard.observe.interception.handwritten.tensor_axes import AxisTable, Dims
from regard.observe.interception.handwritten.traces import Trace, TraceKind
from regard.observe.interception.provenance import TOKEN, ModuleFrame
from regard.observe.interception.thread_state import drop_expanded_axes

FREED = "it is linear attention, whose keys or values were freed before queries were multiplied with the sum of their products"
SUMMED = ("sum", "mean")


class GatedSum(NamedTuple):
    """A sum of keys times values, entry by entry, by weak references, with the labels of its product, which has no operands."""

    tensor: TensorRef
    operands: tuple[TensorRef, TensorRef]
    labels: Labels  # of both operands
    result: Labels
    factor: float

    def read(self) -> LabelledProduct | None:
        """Return the product that it amounts to; None if an operand was freed."""
        a, b = (one() for one in self.operands)
        return None if a is None or b is None else LabelledProduct((a, b), (self.labels, self.labels), self.result, self.factor)


class GatedProduct(NamedTuple):
    """The product of a tensor, in whatever layout a sum of keys times values has there, with queries."""

    x: Tensor
    q: Tensor
    summed: GatedSum

    def find_roles(
        self, table: AxisTable, product: LabelledProduct, y: Tensor
    ) -> tuple[ChainRoles, Trace, LabelledProduct] | None:
        """Return the roles of queries, keys and values, with the product y, from the product that is summed."""
        own, form = drop_expanded_axes(self.x.detach()), start_form(table, product)
        dims = place_axes(table, form.dims, own)
        if dims is None:
            return None
        multiplied = label_entries(own, self.q)
        _, q_dims, y_dims = multiplied.build_dims(table, {0: dims})
        keys = list_axes(table, form.a_dims) - list_axes(table, form.dims)
        roles = ChainRoles(self.q, form.a, form.b, q_dims, form.a_dims, form.b_dims, set(), keys, y_dims, is_causal=False)
        return roles, Trace(weakref.ref(y), TraceKind.SCORES, True, 0, y.numel(), form=form), multiplied


class GatedSums:
    """The sums over tokens of keys times values in the modules that run."""

    def __init__(self) -> None:
        self.weighted = WeakTensorKeyDictionary()  # a softmax and values by their product, which nothing has used yet
        self.held = WeakTensorKeyDictionary()  # the last softmax and values that were summed over tokens, by the sum
        self.sums: weakref.WeakKeyDictionary[ModuleFrame, dict[int, GatedSum]] = weakref.WeakKeyDictionary()

    def clear(self) -> None:
        """Forget all sums."""
        self.weighted.clear()
        self.held.clear()
        self.sums.clear()

    def add_weighted(self, name: str, args: Any, y: Tensor) -> None:
        """Add the product y of a softmax with values, entry by entry: nothing else may hold the softmax until it is summed."""
        if strip_affixes(name) in PRODUCTS and len(args) == 2 and args[0].shape == args[1].shape:
            self.weighted.clear()
            self.weighted[y] = args[0], args[1]

    def release(self, tensors: list[Tensor]) -> None:
        """Release the softmax whose product with values something else than a sum uses."""
        if len(self.weighted) and any(x in self.weighted for x in tensors):
            self.weighted.clear()

    def add_sum(self, frames: list[ModuleFrame], name: str, args: Any, kwargs: Any, y: Tensor) -> None:
        """Add y if it is the sum over tokens of keys times values."""
        if strip_affixes(name) not in SUMMED or not isinstance(args[0], Tensor) or args[0].is_nested:
            return
        frame, x = frames[-1], args[0]
        held: tuple[Tensor, Tensor] | None = self.weighted.get(x) if len(self.weighted) else None
        self.weighted.clear()
        factors = find_factors(frame, x)
        summed = None if factors is None else label_sum(label_entries(x, x), name, args, kwargs)
        if factors is None or summed is None or not summed.sums_several() or not sums_tokens(frames, factors, summed):
            return
        if held is None and any(find_projection(frames, one) is None for one in factors):
            return  # a mask
        if held is not None:
            self.held.clear()
            self.held[y] = held
        own = weakref.ref(y)
        self.sums.setdefault(frame, {})[id(own)] = GatedSum(own, factors, summed.labels[0], summed.result, summed.factor)

    def find_product(self, frames: list[ModuleFrame], name: str, args: Any, y: Tensor) -> GatedProduct | None:
        """Return the product y of queries with a sum of keys times values; None if it is none."""
        if strip_affixes(name) not in PRODUCTS or len(args) != 2 or not all(isinstance(x, Tensor) for x in args):
            return None
        for x, q in (args, args[::-1]):
            summed = self.find_sum(frames[-1], x)
            if summed is None or q.numel() < y.numel() or drop_expanded_axes(x.detach()).numel() == y.numel():
                continue
            if any(one() is q for one in summed.operands) or find_projection(frames, q) is None:
                continue
            return GatedProduct(x, q, summed)
        return None

    def find_sum(self, frame: ModuleFrame, x: Tensor) -> GatedSum | None:
        """Return the sum that a tensor is, in another layout or not; None if it was written into."""
        sums, maker = self.sums.get(frame), skip_layouts(frame, weakref.ref(x))
        if maker is not None and maker.name == "__getitem__" and maker.sizes[0] == x.numel():
            maker = skip_layouts(frame, maker.given[0])
        if sums is None or maker is None or maker.child is not None or strip_affixes(maker.name) not in SUMMED:
            return None
        return sums.get(id(maker.results[0])) if maker.results else None


def find_factors(frame: ModuleFrame, x: Tensor) -> tuple[TensorRef, TensorRef] | None:
    """Return the two other tensors of its shape, freed or not, whose product by entries a tensor is; None if it is none."""
    makers = frame.find_makers(weakref.ref(x))
    if len(makers) != 1 or strip_affixes(makers[0].name) not in PRODUCTS or makers[0].sizes != [x.numel()] * 2:
        return None
    a, b = makers[0].given
    has_shape = all(tensor is None or tensor.shape == x.shape for tensor in (a(), b()))
    return (a, b) if a is not b and has_shape else None


def sums_tokens(frames: list[ModuleFrame], factors: tuple[TensorRef, TensorRef], summed: LabelledProduct) -> bool:
    """Return whether the tokens of a module's input are what a sum of the product of two tensors of tokens sums over."""
    if any(frames[-1].find_contents(one) != TOKEN for one in factors):
        return False
    found = [sums_tokens_of_layer(frames, one, summed) for one in factors]
    return any(found) and False not in found


def sums_tokens_of_layer(frames: list[ModuleFrame], x: TensorRef, summed: LabelledProduct) -> bool | None:
    """Return whether a sum is over the tokens of what a layer has made, of which x is a factor; None if no layer is known.

    Batch, tokens and features lie in memory as the layer wrote them, in whatever order x has them. A freed factor has the
    layout of the product.
    """
    projection, tensor = find_projection(frames, x), x()
    is_last = None if projection is None else has_features_last(projection)
    tensor = summed.operands[0] if tensor is None else tensor
    own = [*zip(summed.labels[0], tensor.stride(), tensor.shape, strict=True)]
    gone = {stride: size for label, stride, size in own if label not in summed.result and size > 1}
    kept = {stride: size for label, stride, size in own if label in summed.result and size > 1}
    if is_last is None or not kept:
        return None
    before = math.prod(size for stride, size in kept.items() if stride > max(gone))
    after = math.prod(size for stride, size in kept.items() if stride < min(gone))
    if before * after != math.prod(kept.values()):
        return False
    inputs = [one for frame in frames for one in frame.input_tensors if not one.is_nested]
    return any(has_axes(list_spatial_sizes(one), is_last, before, math.prod(gone.values()), after) for one in inputs)


def list_spatial_sizes(x: Tensor) -> list[tuple[int, list[int]]]:
    """Return the sizes of batch and of axes of tokens that an input (b, ..., c), (b, c, ...) or ids (b, t) may have."""
    if x.dim() == 2 and not x.is_floating_point():
        return [(x.shape[0], [x.shape[1]])]
    return [(x.shape[0], [*x.shape[1:-1]]), (x.shape[0], [*x.shape[2:]])] if x.dim() > 2 else []


def has_axes(inputs: list[tuple[int, list[int]]], is_last: bool, before: int, entries: int, after: int) -> bool:
    """Return whether an axis of tokens, or all of them, has a number of entries, with as many others before and after them.

    Features are kept, behind the tokens if they are last.
    """
    for batch, sizes in inputs:
        for start, end in {(0, len(sizes)), *((n, n + 1) for n in range(len(sizes)))}:
            outer, inner = batch * math.prod(sizes[:start]), math.prod(sizes[end:])
            fits = before == outer and after > inner if is_last else before > outer and not before % outer and after == inner
            if fits and entries == math.prod(sizes[start:end]):
                return True
    return False


def place_axes(table: AxisTable, dims: Dims, x: Tensor) -> Dims | None:
    """Return the axes of a tensor that has those of `dims` in their order and else dimensions of size 1; None if it has not."""
    axes = iter([one for one in dims if one])
    placed = tuple(next(axes, None) if size > 1 else () for size in x.shape)
    found = [one for one in placed if one is not None]
    sizes = [math.prod(table.get_sizes(table.expand_axes(one))) for one in found]
    is_same = len(found) == len(placed) and next(axes, None) is None and sizes == [*x.shape]
    return tuple(found) if is_same else None
