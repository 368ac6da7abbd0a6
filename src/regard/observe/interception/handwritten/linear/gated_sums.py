"""Linear attention with a head for each channel: keys times values, entry by entry, are summed and multiplied by queries.

``o_i = q_i Σ_j k_j v_j``, as in Hydra attention (https://arxiv.org/abs/2209.07484). Keys may be a softmax over the
tokens, as in AFT-Simple (https://arxiv.org/abs/2105.14103). Layers make queries, keys and values, and the sum is over tokens
of an input of a module, not over features, heads or a batch; or it is a running sum. Other factors, as a mask, multiply the
products; a number or a tensor, as a sum of keys, divides their sum. Keys and values are held by weak references: most sums of
products are no attention. A softmax alone, a divisor and what an einsum sums are held as long as the sum.
"""

import weakref
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

from regard.map.computed_bias import drop_repeated_axes
from regard.mechanism.scores import score_dtype
from regard.observe.interception.function_roles import strip_affixes
from regard.observe.interception.handwritten.ancestors.ancestor_search import TensorRef
from regard.observe.interception.handwritten.ancestors.product_factors import USES, Factor, Use, find_computation
from regard.observe.interception.handwritten.ancestors.projections import find_projection
from regard.observe.interception.handwritten.ancestors.summed_products import SUMMED, SummedProduct, find_einsum, find_sum
from regard.observe.interception.handwritten.linear.linear_attention import ChainRoles
from regard.observe.interception.handwritten.products.labelled_product import (
    LabelledProduct,
    Labels,
    label_einsum,
    label_entries,
)
from regard.observe.interception.handwritten.products.score_form import PRODUCTS, ScoreForm, StepKind, start_form
from regard.observe.interception.handwritten.products.tensor_axes import Axes, AxisTable
from regard.observe.interception.handwritten.products.traces import Trace, TraceKind, read_eps
from regard.observe.interception.provenance import TOKEN, ModuleFrame

FREED = "it is linear attention, whose keys or values were freed before queries were multiplied with the sum of their products"
FREED_FACTOR = "it is linear attention, whose keys or values were multiplied by a tensor that was freed before queries were"
MOVED = "it is linear attention, whose products of keys with values were put in another layout, which is not followed"


class GatedSum(NamedTuple):
    """A sum of keys times values, entry by entry, by weak references, and what multiplied or divided it."""

    name: str  # of the function that made it
    tensor: TensorRef
    summand: TensorRef  # the products, or the values of an einsum
    product: SummedProduct
    scales: tuple[Factor, ...] = ()

    def explain_unread(self) -> str:
        """Return why it cannot be read; nothing if it can be."""
        factors = (*self.product.operands, *self.product.others, *self.scales)
        are_freed = [one.tensor() is None for one in factors]
        if any(are_freed):
            return FREED if any(are_freed[:2]) else FREED_FACTOR
        return MOVED if any(one.labels is None for one in factors) else ""

    def build_form(self, table: AxisTable) -> tuple[ScoreForm, dict[Hashable, Axes]]:
        """Return the form of the sum, and the axes of labels. Nothing of it may have been freed."""
        product = self.product
        (k, of_k), (v, of_v) = (one.read() for one in product.operands)
        form = start_form(table, LabelledProduct((k, v), (of_k, of_v), [*product.result], product.factor))
        axes = dict(zip((*of_k, *of_v), (*form.a_dims, *form.b_dims), strict=True))
        for factor in product.others:
            form = multiply_form(form, factor, axes)
        if product.is_running:
            form = form.add_step(StepKind.CUMSUM, None, tuple(axes[label] for label in product.keys))
        for factor in self.scales:
            form = multiply_form(form, factor, axes)
        return form, axes


class GatedProduct(NamedTuple):
    """The product of a tensor, in whatever layout a sum of keys times values has there, at a place, with queries."""

    multiplied: LabelledProduct
    place: int
    summed: GatedSum

    def find_roles(self, table: AxisTable, y: Tensor) -> tuple[ChainRoles, Trace] | None:
        """Return the roles of queries, keys and values, with the product y; None if the axes are not known."""
        product = self.summed.product
        labels = label_dims(product.result, self.multiplied.operands[self.place])
        if labels is None:
            return None
        form, axes = self.summed.build_form(table)
        own = tuple(() if label is None else axes[label] for label in labels)
        dims, q = self.multiplied.build_dims(table, {self.place: own}), self.multiplied.operands[1 - self.place]
        dtype = torch.promote_types(q.dtype, form.a.dtype)  # the sum may have been converted to that of the queries
        roles = ChainRoles(
            q=q.to(dtype),
            k=form.a.to(dtype),
            v=form.b,
            q_dims=dims[1 - self.place],
            k_dims=form.a_dims,
            v_dims=form.b_dims,
            features=set(),
            keys={axis for label in product.keys for axis in table.expand_axes(axes[label])},
            dims=dims[2],
            is_causal=product.is_running,
        )
        eps = max(read_eps(one.dtype) for one in (form.a, form.b, y))
        return roles, Trace(weakref.ref(y), TraceKind.SCORES, True, 0, y.numel(), form=form, eps=eps)


class GatedSums:
    """The sums over tokens of keys times values in the modules that run."""

    def __init__(self) -> None:
        self.weighted = WeakTensorKeyDictionary()  # a softmax and values by their product, which nothing has used yet
        self.held = WeakIdKeyDictionary()  # what a sum needs that nothing else may hold, by the storage of the sum
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
        """Add y if it is the sum, or the running sums, over tokens of keys times values."""
        if strip_affixes(name) not in SUMMED or not isinstance(args[0], Tensor) or args[0] is y:
            return
        held: tuple[Tensor, ...] = self.weighted.get(args[0], ()) if len(self.weighted) else ()
        self.weighted.clear()
        product = find_sum(frames, name, args, kwargs)
        if product is not None:
            if held:
                self.held.clear()
            self.put(frames[-1], GatedSum(name, weakref.ref(y), weakref.ref(args[0]), product), y, held)

    def add_einsum(self, frames: list[ModuleFrame], args: Any, y: Tensor) -> None:
        """Add y if it is an einsum that multiplies keys with values, entry by entry, and sums over tokens."""
        product = find_einsum(frames, args)
        if product is not None:
            self.put(frames[-1], GatedSum("einsum", weakref.ref(y), product.operands[1].tensor, product), y, args[1:])

    def put(self, frame: ModuleFrame, summed: GatedSum, y: Tensor, held: tuple[Tensor, ...]) -> None:
        """Store the sum y, and hold what it needs as long as a view of it."""
        storage = find_storage(y)
        if held and storage is not None:
            self.held[storage] = held
        self.sums.setdefault(frame, {})[id(summed.tensor)] = summed

    def add_scaled(self, frame: ModuleFrame, name: str, args: Any, kwargs: Any, y: Tensor) -> None:
        """Add y if it is such a sum divided by a number or a tensor, or multiplied by what is of no token."""
        core = strip_affixes(name)
        use = USES.get(core)
        is_reversed = use is Use.DIVIDE and name.startswith("__r")
        if use in (None, Use.HIDE) or is_reversed or len(args) != 2 or kwargs or any(x is y for x in args):
            return
        for x, by in (args,) if use is Use.DIVIDE else (args, args[::-1]):
            summed = self.find_sum(frame, x) if isinstance(x, Tensor) and x.numel() == y.numel() else None
            if summed is None:
                continue
            product, storage = summed.product, find_storage(x)
            held: tuple[Tensor, ...] = () if storage is None else self.held.get(storage, ())
            labels = label_dims(product.result, y)
            if isinstance(by, Tensor):
                is_gate = use is Use.MULTIPLY and frame.find_contents(weakref.ref(by)) == TOKEN
                if is_gate or labels is None:
                    continue
                own = labels[y.dim() - by.dim() :]
                own = [label if size > 1 else None for label, size in zip(own, by.shape, strict=True)]
                summed = summed._replace(scales=(*summed.scales, Factor(weakref.ref(by), by.numel(), use, own)))
                held = (*held, by)
            elif isinstance(by, int | float) and (by or use is Use.MULTIPLY):
                factor = product.factor / by if use is Use.DIVIDE else product.factor * by
                summed = summed._replace(product=product._replace(factor=factor))
            else:
                continue
            self.put(frame, summed._replace(name=name, tensor=weakref.ref(y)), y, held)
            return

    def find_product(self, frames: list[ModuleFrame], name: str, args: Any, y: Tensor) -> GatedProduct | None:
        """Return the product y of queries with a sum of keys times values; None if it is none."""
        is_einsum = name == "einsum" and isinstance(args[0], str)
        operands = args[1:] if is_einsum else args
        if not is_einsum and strip_affixes(name) not in PRODUCTS:
            return None
        if len(operands) != 2 or not all(isinstance(x, Tensor) for x in operands):
            return None
        for place, x in enumerate(operands):
            summed, q = self.find_sum(frames[-1], x), operands[1 - place]
            if summed is None or q.numel() < y.numel():
                continue
            own = drop_repeated_axes(x.detach())
            if not summed.product.is_running and own.numel() == y.numel():
                continue
            if any(one() is q for one in (*(factor.tensor for factor in summed.product.operands), summed.summand)):
                continue
            pair = (own, q) if place == 0 else (q, own)
            multiplied = label_einsum(args[0], *pair) if is_einsum else label_entries(*pair)
            if multiplied is None or multiplied.sums_several() or find_projection(frames, q) is None:
                continue
            return GatedProduct(multiplied, place, summed)
        return None

    def find_sum(self, frame: ModuleFrame, x: Tensor) -> GatedSum | None:
        """Return the sum that a tensor is, in another layout or dtype or not; None if it was written into."""
        sums = self.sums.get(frame)
        maker = None if sums is None else find_computation(frame, weakref.ref(x), x.numel())
        if sums is None or maker is None or maker.child is not None or not maker.results:
            return None
        found = sums.get(id(maker.results[0]))
        return found if found is not None and found.name == maker.name else None


def find_storage(x: Tensor) -> Any:
    """Return the storage of a tensor; None if it has none, as those of torch.func."""
    try:
        return x.untyped_storage()
    except (RuntimeError, NotImplementedError):
        return None


def multiply_form(form: ScoreForm, factor: Factor, axes: dict[Hashable, Axes]) -> ScoreForm:
    """Return a form multiplied or divided by a factor, with the axes of labels."""
    by, labels = factor.read()
    if factor.use is Use.DIVIDE:
        by = by.to(torch.promote_types(by.dtype, score_dtype(form.a.dtype))).reciprocal()
    return form.add_step(StepKind.MULTIPLY, by, tuple(axes[label] for label in labels))


def label_dims(sizes: dict[Hashable, int], x: Tensor) -> Labels | None:
    """Return the label of each dimension of x with several entries, in the order of their sizes or of memory, and else None.

    None if x has other sizes.
    """
    several = [n for n, size in enumerate(x.shape) if size > 1]
    for order in (several, sorted(several, key=x.stride, reverse=True)):
        if [x.shape[n] for n in order] == [*sizes.values()]:
            places = dict(zip(order, sizes, strict=True))
            return [places.get(n) for n in range(x.dim())]
    return None
