"""The formula of followed scores: the product of two tensors, and the steps that scaled, bounded, shifted and masked it."""

import math
from collections.abc import Hashable
from enum import Enum, auto
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.mechanism.scores import score_dtype
from regard.observe.interception.function_roles import BASES, strip_affixes
from regard.observe.interception.handwritten.products.labelled_product import LabelledProduct
from regard.observe.interception.handwritten.products.tensor_axes import Axes, AxisTable, Dims, find_permutation
from regard.observe.interception.lookups import PERMUTES_AXES
from regard.observe.interception.provenance import is_in_place

VIEWS = {"view", "reshape", "unflatten", "flatten", "squeeze", "unsqueeze", "view_as", "reshape_as", "ravel", "unsafe_view"}
PERMUTES = PERMUTES_AXES | {"t", "T", "mT", "H", "mH", "adjoint"}
SLICES = {"getitem", "narrow", "select", "split", "split_with_sizes", "tensor_split", "chunk", "unbind"}  # return some entries
COPIES = {  # functions that keep every number
    *("contiguous", "clone", "detach", "positive", "to", "type", "type_as", "float", "double", "half", "bfloat16", "alias"),
    *("requires_grad", "data"),
}
BOUNDS = {"nan_to_num", "clamp", "clip", "clamp_min", "clamp_max", "maximum", "max"}
SAME = COPIES | BOUNDS  # or change only what no softmax sees: a lower bound, NaN
PRODUCTS, QUOTIENTS = {"mul", "multiply"}, {"div", "divide", "true_divide", "truediv"}  # entry by entry
MOVERS = {  # functions that move entries, so that an axis is no longer that of the keys in their order
    *("roll", "flip", "fliplr", "flipud", "rot90", "gather", "index_select", "take_along_dim", "take", "getitem", "select"),
    *("narrow", "repeat", "repeat_interleave", "tile", "cat", "concat", "concatenate", "stack", "unbind", "split", "chunk"),
    *("sort", "msort", "argsort", "topk", "scatter", "scatter_add", "index_put", "setitem", "index_copy", "index_add", "pad"),
    *("unfold", "fold", "as_strided", "diagonal", "diag_embed", "masked_select", "copy", "permute_copy", "constant_pad_nd"),
}
REDUCES = {"max", "amax", "logsumexp", "special_logsumexp"}  # a row to one number, also a row of one entry
CHOOSES_BY_VALUE = {"sort", "msort", "argsort", "topk"}  # those of them that put entries in an order of their values
KEEPING = VIEWS | SAME | {"expand", "broadcast_to", "expand_as", "getitem", "log_softmax"}  # the softmax is the same


class StepKind(Enum):
    """What a step does to scores."""

    MULTIPLY = auto()
    ADD = auto()
    FILL = auto()  # writes a number where a table is True
    TANH = auto()
    SINK = auto()  # one more term of the softmax's sum, which is no key


class ScoreStep(NamedTuple):
    """One step: its operand, the axes of that if it is a tensor, and the factor of what is added or the number filled in."""

    kind: StepKind
    operand: "Tensor | float | ScoreForm | None" = None
    dims: Dims = ()
    amount: float = 1.0
    source: "ScoreForm | None" = None  # the form of what is added, which is no product of queries and keys


class DistanceIndex(NamedTuple):
    """Which row of a table two tokens pick by their distance: rows[j - i + n - 1] for the i-th of n and the j-th other."""

    own: Axes  # of the tokens that are multiplied with the rows
    other: Axes
    table: Axes
    rows: Tensor  # -1 at distances that have entries of other tokens


class ScoreForm(NamedTuple):
    """Scores as the product of a and b, with the axes of each tensor, and the steps that followed."""

    a: Tensor
    b: Tensor
    a_dims: Dims
    b_dims: Dims
    dims: Dims  # of the scores
    steps: tuple[ScoreStep, ...] = ()
    shared: Axes = ()  # axes of one operand along which the other is shared: heads, of which all have the same keys
    distances: DistanceIndex | None = None  # if the scores are products with a table, of which the distance picked some

    def drop_sources(self) -> "ScoreForm":
        """Return the form with what its steps add as it is, not as the products that it was made of."""
        return self._replace(steps=tuple(step._replace(source=None) for step in self.steps))

    def add_step(self, *step: Any) -> "ScoreForm":
        """Return the form with one more step."""
        return self._replace(steps=(*self.steps, ScoreStep(*step)))


def start_form(table: AxisTable, product: LabelledProduct) -> ScoreForm:
    """Return the form of scores that a product has just made."""
    a, b, dims = product.build_dims(table, {})
    form = ScoreForm(*product.operands, a, b, dims, shared=find_shared_axes(product, dims))
    if product.factor != 1:
        form = form.add_step(StepKind.MULTIPLY, product.factor)
    if product.added is not None:
        start, beta = product.added
        form = form.add_step(StepKind.ADD, start.detach(), select_dims(start, dims), beta)
    return form


def find_shared_axes(product: LabelledProduct, dims: Dims) -> Axes:
    """Return the axes of scores that one operand broadcasts, or lacks where the other has several and it has one of its own."""
    first, second = product.labels
    axes = dict(zip(product.result, dims, strict=True))
    labels_of_shared = [
        label for label in product.result if label in first and label in second and is_broadcast(product, label)
    ]
    own = [
        [label for label in product.result if label in one and label not in other]
        for one, other in ((first, second), (second, first))
    ]
    for labels, others in (own, own[::-1]):
        labels_of_shared += labels[:-1] if len(others) == 1 else []
    return tuple(axis for label in labels_of_shared for axis in axes[label])


def is_broadcast(product: LabelledProduct, label: Hashable) -> bool:
    """Return whether one operand of a product has size 1 along a label and the other has not."""
    sizes = [x.shape[labels.index(label)] for x, labels in zip(product.operands, product.labels, strict=True)]
    return 1 in sizes and sizes[0] != sizes[1]


def select_dims(x: Tensor, dims: Dims) -> Dims:
    """Return the axes of a tensor that is broadcast against one of these axes; its dimensions of size 1 have none."""
    own = dims[len(dims) - x.dim() :]
    return tuple(axes if size > 1 else () for axes, size in zip(own, x.shape, strict=True))


def follow_dims(
    table: AxisTable, dims: Dims, name: str, func: Any, args: Any, kwargs: Any, x: Tensor, y: Tensor
) -> Dims | None:
    """Return the axes of the result y of a function of a followed tensor x; None if it moved entries.

    A function that is not known and keeps the shape is taken to be one of each entry.
    """
    core = name if name in PERMUTES else strip_affixes(name)
    is_first = bool(args) and args[0] is x
    if core in VIEWS or (core == "getitem" and is_view_index(args[1])):
        return table.regroup(dims, y.shape)
    if core in PERMUTES:
        if core in ("T", "mT", "H", "mH"):
            order = [*range(x.dim())][::-1] if core in ("T", "H") else [*range(x.dim() - 2), x.dim() - 1, x.dim() - 2]
        else:
            order = find_permutation(x, func, args, kwargs)
        return tuple(dims[n] for n in order)
    if core in ("expand", "broadcast_to", "expand_as"):
        return table.align(dims, y.shape) if y.numel() == x.numel() else None
    if core in REDUCES:
        return None
    if core in MOVERS and not (core == "setitem" and is_first):  # writing into a followed tensor moves none of its entries
        return None
    return table.align(dims, y.shape)


def is_view_index(index: Any) -> bool:
    """Return whether an index only adds axes of size 1."""
    entries = index if isinstance(index, tuple) else (index,)
    return all(one is None or one is Ellipsis or (isinstance(one, slice) and one == slice(None)) for one in entries)


def extend_form(
    table: AxisTable, form: ScoreForm, name: str, args: Any, kwargs: Any, x: Tensor, dims: Dims, other: ScoreForm | None
) -> ScoreForm | None:
    """Return the form of the result of a function of scores x; None if the formula cannot express it.

    `dims` are the axes of the result; `other` is the form of another argument, if it is also followed.
    """
    core = strip_affixes(name)
    form = form if form.dims == dims else form._replace(dims=dims)
    if core in KEEPING or name in PERMUTES or is_inactive_dropout(core, args, kwargs):
        return form
    if core == "tanh":
        return form.add_step(StepKind.TANH)
    if core in BASES:  # the weights are those of a softmax of scores times the logarithm of the base
        return form if core == "exp" else form.add_step(StepKind.MULTIPLY, math.log(BASES[core]))
    if core == "neg":
        return form.add_step(StepKind.MULTIPLY, -1.0)
    if core in ("masked_fill", "where", "setitem"):
        return extend_by_fill(form, core, args, kwargs, x)
    values = [value for value in args if value is not x and isinstance(value, Tensor | int | float)]
    return extend_by_arithmetic(table, form, name, args, kwargs, x, values[0], other) if values else None


def extend_by_arithmetic(
    table: AxisTable, form: ScoreForm, name: str, args: Any, kwargs: Any, x: Tensor, value: Any, other: ScoreForm | None
) -> ScoreForm | None:
    """Return the form of a sum, difference, product or quotient of scores x and a value; None for another function."""
    core = strip_affixes(name)
    is_first = bool(args) and args[0] is x
    is_reversed = name.startswith("__r") or not is_first  # the value is on the left
    operand = value.detach() if isinstance(value, Tensor) else float(value)
    if is_in_place(name) and not is_first:  # the value was written into
        if core != "add":
            return None
        operand = operand - x.detach() * kwargs.get("alpha", 1)  # as before, up to rounding
    dims = select_dims(value, form.dims) if isinstance(value, Tensor) else ()
    if core in PRODUCTS:
        return None if other is not None else form.add_step(StepKind.MULTIPLY, operand, dims)
    if core in QUOTIENTS:
        if is_reversed or kwargs.get("rounding_mode"):
            return None
        if isinstance(operand, Tensor):  # a number of lower precision than the scores is divided by in theirs
            operand = operand.to(torch.promote_types(operand.dtype, score_dtype(x.dtype)))
        return form.add_step(StepKind.MULTIPLY, 1 / operand, dims)
    if core not in ("add", "sub", "subtract", "rsub"):
        return None
    amount = float(kwargs.get("alpha", 1))
    if not is_first and amount != 1:
        form, amount = form.add_step(StepKind.MULTIPLY, amount), 1.0
    if core != "add":
        is_reversed = is_reversed != (core == "rsub")
        amount = -amount
        if is_reversed:
            form, amount = form.add_step(StepKind.MULTIPLY, -1.0), -amount
    is_same = other is not None and len(form.dims) == len(other.dims) and table.identify(form.dims, other.dims)
    if other is not None and is_same and other.distances is None and is_separable(table, form, other):
        return form.add_step(StepKind.ADD, other, form.dims, amount)
    return form.add_step(StepKind.ADD, operand, dims, amount, other if is_same else None)


def is_separable(table: AxisTable, form: ScoreForm, other: ScoreForm) -> bool:
    """Return whether other scores are a product of queries and keys too, not of keys that differ from query to query."""
    shared = [
        {axis for axes in table.expand_dims(one.a_dims) for axis in axes}
        & {axis for axes in table.expand_dims(one.b_dims) for axis in axes}
        & {axis for axes in table.expand_dims(one.dims) for axis in axes}
        for one in (form, other)
    ]
    return shared[1] <= shared[0]


def extend_by_fill(form: ScoreForm, core: str, args: Any, kwargs: Any, x: Tensor) -> ScoreForm | None:
    """Return the form of scores x with a number written where a table is True; None if it is not a number or a table."""
    if core == "where":
        if len(args) != 3:
            return None
        table = args[1] if args[0] is x else args[0]
        value = args[2] if args[0] is x or args[1] is x else args[1]
        table = ~table if args[0] is x or args[1] is x else table
    else:
        arguments = [*args[1:], *(kwargs[name] for name in ("mask", "value") if name in kwargs)]
        if len(arguments) != 2:
            return None
        table, value = arguments
    if (
        not isinstance(table, Tensor)
        or table.dtype not in (torch.bool, torch.uint8)
        or (core == "setitem" and table.shape != x.shape)
    ):
        return None
    if isinstance(value, Tensor):
        if not value.numel() or not bool((value == value.flatten()[0]).all()):  # a table of one number, as zeros_like
            return None
        value = value.flatten()[0]
    return form.add_step(StepKind.FILL, table.detach().bool(), select_dims(table, form.dims), float(value))


def is_inactive_dropout(core: str, args: Any, kwargs: Any) -> bool:
    """Return whether a function is a dropout that drops nothing."""
    if core != "dropout":
        return False
    p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
    training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
    return not training or p == 0
