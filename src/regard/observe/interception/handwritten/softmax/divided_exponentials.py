"""A softmax that a layer writes out, of scores that nothing follows: exponentials, divided by their own sums.

The division may be a product with one over the sums, a norm, or exponentials of scores minus the logarithm of the sums.
Sigmoids that are divided by their sums weigh tokens alike.
"""

import weakref
from typing import Any, NamedTuple

from torch import Tensor

from regard.observe.interception.function_roles import Role, find_activation_name, infer_role, strip_affixes
from regard.observe.interception.handwritten.ancestors.ancestor_search import TensorRef
from regard.observe.interception.handwritten.ancestors.layouts import skip_layouts
from regard.observe.interception.handwritten.products.score_form import PRODUCTS, QUOTIENTS
from regard.observe.interception.plain_tensors import is_comparable
from regard.observe.interception.provenance import ModuleFrame, Operation

EXPONENTIALS = {"exp", "exp2"}
POSITIVE = {"sigmoid", "special_expit", "softplus"}  # functions of a score that are a weight after a division by their sums
INVERSES = {"reciprocal", "__rdiv__", "__rtruediv__"}  # of sums that a number is divided by
DIVIDES = PRODUCTS | QUOTIENTS  # functions that may divide exponentials by their sums
HIDES = PRODUCTS | {"masked_fill", "where"}  # functions by which a mask hides exponentials
LOGARITHMS_OF_SUMS = {"logsumexp", "special_logsumexp"}
NORM = ("input", "p", "dim")  # the first arguments of F.normalize


class Softmax(NamedTuple):
    """The scores of weights, the axis of the sums that they were divided by, and the function that made weights of scores."""

    scores: TensorRef
    axis: int
    function: str = "softmax"


def may_divide_by_sums(name: str, args: Any) -> bool:
    """Return whether a function of this name may divide exponentials by their sums: quick, for the many functions."""
    core = strip_affixes(name)
    if core == "normalize":
        return True
    if core not in DIVIDES or len(args) != 2 or not all(isinstance(x, Tensor) for x in args):
        return False
    return core in QUOTIENTS or args[0].numel() != args[1].numel()


def find_divided(frame: ModuleFrame, name: str, args: Any, kwargs: Any) -> Softmax | None:
    """Return the scores of which a function of this name divides exponentials or sigmoids by their own sums, or None."""
    return find_divided_exponentials(frame, name, args, kwargs) or find_divided_gates(frame, name, args, kwargs)


def find_divided_exponentials(frame: ModuleFrame, name: str, args: Any, kwargs: Any) -> Softmax | None:
    """Return the scores whose exponentials a function of this name divides by their own sums, and the axis of these sums.

    The largest score may have been taken from all, a mask may hide exponentials, and a number may be added to the sums.
    """
    core = strip_affixes(name)
    if core in EXPONENTIALS:
        return find_shifted_softmax(frame, args[0])
    if core == "normalize":
        return find_normed_exponentials(frame, args, kwargs)
    if not may_divide_by_sums(name, args):
        return None
    x, by = args if core in QUOTIENTS else sorted(args, key=Tensor.numel, reverse=True)
    axis, sums = find_axis(x, by), weakref.ref(by)
    if axis is None:
        return None
    if core in PRODUCTS:
        inverse = skip_layouts(frame, sums)
        if inverse is None or inverse.name not in INVERSES or len(inverse.given) != 1:
            return None
        sums = inverse.given[0]
    scores, total = find_scores(frame, weakref.ref(x)), find_sum(frame, sums)
    if scores is None or total is None or find_scores(frame, total.given[0]) is not scores:
        return None
    return Softmax(scores, axis) if find_summed_axis(total, x) in (None, axis) else None


def find_divided_gates(frame: ModuleFrame, name: str, args: Any, kwargs: Any) -> Softmax | None:
    """Return the scores of which a function of this name divides sigmoids by their own sums, and the axis of these sums."""
    core = strip_affixes(name)
    if core == "normalize":
        x, p, dim = read_norm(args, kwargs)
        gate = find_positive_function(frame, weakref.ref(x))
        is_known = gate is not None and p == 1 and type(dim) is int
        return Softmax(gate.given[0], dim % x.dim(), name_function(gate) or "sum") if gate is not None and is_known else None
    if core not in QUOTIENTS or not may_divide_by_sums(name, args):
        return None
    x, by = args
    axis, gate, total = find_axis(x, by), find_positive_function(frame, weakref.ref(x)), find_sum(frame, weakref.ref(by))
    if axis is None or gate is None or total is None or find_positive_function(frame, total.given[0]) is not gate:
        return None
    is_along = find_summed_axis(total, x) in (None, axis)
    return Softmax(gate.given[0], axis, name_function(gate) or "sum") if is_along else None


def find_positive_function(frame: ModuleFrame, x: TensorRef) -> Operation | None:
    """Return the positive function of scores that a tensor is, in another layout or not, hidden by a mask or not."""
    maker = skip_layouts(frame, x)
    if maker is not None and strip_affixes(maker.name) in HIDES:
        made = (one for given in maker.given for one in frame.find_makers(given))
        return next((one for one in made if is_positive(one)), None)
    return maker if maker is not None and is_positive(maker) else None


def is_positive(maker: Operation) -> bool:
    """Return whether an operation is a positive function, or one of no negative numbers, one for each token."""
    if name_function(maker) in POSITIVE:
        return True
    may_be_positive = maker.child is not None or infer_role(maker.name) is Role.NONLINEAR
    y = maker.results[0]() if may_be_positive and maker.results else None
    if y is None or not is_comparable(y) or y.dim() < 2 or y.shape[-1] != 1:
        return False
    return bool((y.detach() >= 0).all())


def name_function(maker: Operation) -> str:
    """Return the name of the function that an operation is, or that a module such as nn.Sigmoid computes."""
    return strip_affixes(maker.name) if maker.child is None else find_activation_name(maker.child.__name__)


def read_norm(args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """Return the tensor that F.normalize is given, the power of its norm and the axis."""
    given = {"p": 2.0, "dim": 1, **dict(zip(NORM, args, strict=False)), **kwargs}
    return given["input"], given["p"], given["dim"]


def find_normed_exponentials(frame: ModuleFrame, args: Any, kwargs: Any) -> Softmax | None:
    """Return the scores whose exponentials F.normalize divides by the sum of their sizes, and the axis of the sum."""
    x, p, dim = read_norm(args, kwargs)
    scores = find_scores(frame, weakref.ref(x)) if p == 1 and type(dim) is int else None
    return None if scores is None else Softmax(scores, dim % x.dim())


def find_shifted_softmax(frame: ModuleFrame, x: Tensor) -> Softmax | None:
    """Return the scores of which x is each minus the logarithm of the sum of their exponentials, and the axis of the sum."""
    shift = skip_layouts(frame, weakref.ref(x))
    if shift is None or not is_subtraction(shift):
        return None
    scores, logarithm = shift.given[0], skip_layouts(frame, shift.given[1])
    if logarithm is None:
        return None
    total, own = logarithm, skip_shift(frame, scores)
    if strip_affixes(logarithm.name) in LOGARITHMS_OF_SUMS:
        others: TensorRef | None = skip_shift(frame, logarithm.given[0])
    elif infer_role(logarithm.name) is Role.LOG and (found := find_sum(frame, logarithm.given[0])) is not None:
        total, others = found, find_scores(frame, found.given[0])
    else:
        return None
    axis = read_axis(total, x.dim())
    return None if axis is None or others is not own else Softmax(own, axis)


def find_sum(frame: ModuleFrame, x: TensorRef) -> Operation | None:
    """Return the sum that a tensor is, in another layout or not, with a number or an exponential for each row added or not."""
    maker = skip_layouts(frame, x)
    if maker is None or infer_role(maker.name) is not Role.ADD or len(maker.given) > 2:
        return maker if maker is not None and sums_over_axis(maker) else None
    added = [one for given in maker.given if (one := skip_layouts(frame, given)) is not None]
    sums = [one for one in added if sums_over_axis(one)]
    is_known = len(sums) == 1 and all(one is sums[0] or is_exponential(one) for one in added)
    return sums[0] if is_known and len(added) == len(maker.given) else None


def sums_over_axis(maker: Operation) -> bool:
    """Return whether an operation sums over an axis."""
    return strip_affixes(maker.name) == "sum"


def find_axis(x: Tensor, sums: Tensor) -> int | None:
    """Return the only axis of x, of several entries, along which all have the same sum; None if there is another one."""
    sizes = [1] * (x.dim() - sums.dim()) + [*sums.shape]
    axes = [n for n, (size, other) in enumerate(zip(x.shape, sizes, strict=False)) if size > other == 1]
    return axes[0] if len(axes) == 1 else None


def find_summed_axis(total: Operation, x: Tensor) -> int | None:
    """Return the axis of exponentials x along which they were summed, in this layout or transposed; None if several or all."""
    axis, terms = read_axis(total, x.dim()), total.given[0]()
    if axis is None or terms is None or terms.dim() != x.dim() or terms.stride() == x.stride():
        return axis
    places = [n for n, stride in enumerate(x.stride()) if stride == terms.stride(axis)]
    return places[0] if len(places) == 1 else axis


def read_axis(total: Operation, rank: int) -> int | None:
    """Return the axis that a sum of a tensor of this rank states; None if it sums over several or over all."""
    axes = total.dim if isinstance(total.dim, tuple | list) else (total.dim,)
    return axes[0] % rank if len(axes) == 1 and type(axes[0]) is int and rank else None


def find_scores(frame: ModuleFrame, x: TensorRef) -> TensorRef | None:
    """Return the scores of which a tensor is the exponentials, before they were shifted; a mask may hide some."""
    maker = find_exponential(frame, x)
    return None if maker is None else skip_shift(frame, maker.given[0])


def find_exponential(frame: ModuleFrame, x: TensorRef) -> Operation | None:
    """Return the exponential that a tensor is, in another layout or not, multiplied or hidden by another tensor or not."""
    maker = skip_layouts(frame, x)
    if maker is not None and strip_affixes(maker.name) in HIDES:
        return next((one for given in maker.given for one in frame.find_makers(given) if is_exponential(one)), None)
    return maker if maker is not None and is_exponential(maker) else None


def is_exponential(maker: Operation) -> bool:
    """Return whether an operation computes exponentials."""
    return strip_affixes(maker.name) in EXPONENTIALS


def is_subtraction(maker: Operation) -> bool:
    """Return whether an operation subtracts fewer numbers from a tensor, as the largest of each row."""
    is_difference = strip_affixes(maker.name) in ("sub", "subtract") and len(maker.sizes) == 2
    return is_difference and maker.sizes[0] > maker.sizes[1]


def skip_shift(frame: ModuleFrame, scores: TensorRef) -> TensorRef:
    """Return scores as they were before fewer numbers were subtracted: no softmax sees these."""
    maker = skip_layouts(frame, scores)
    return maker.given[0] if maker is not None and is_subtraction(maker) else scores
