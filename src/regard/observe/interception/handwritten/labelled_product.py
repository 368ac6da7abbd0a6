"""Products of two tensors as an einsum has them: a label for each dimension of the operands and of the result."""

import string
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from regard.observe.interception.function_roles import strip_affixes
from regard.observe.interception.handwritten.contraction import find_operands
from regard.observe.interception.handwritten.tensor_axes import AxisTable, Dims

Labels = list[Hashable]
ADDED = {"addmm": 1, "addmv": 1, "baddbmm": 1}  # whose first argument is added to the product


class LabelledProduct(NamedTuple):
    """Two operands, the labels of their dimensions and of the result's, a factor, and what is added, with its own factor."""

    operands: tuple[Tensor, Tensor]
    labels: tuple[Labels, Labels]
    result: Labels
    factor: float = 1.0
    added: tuple[Tensor, float] | None = None

    def build_dims(self, table: AxisTable, known: dict[int, Dims]) -> tuple[Dims, Dims, Dims]:
        """Return the axes of both operands and of the result; `known` are those of an operand by its place.

        A dimension of size 1 has no axis. Axes of a label that one operand knows are those of the other.
        """
        axes: dict[Hashable, tuple[int, ...]] = {}
        for place, dims in known.items():
            axes |= {label: one for label, one in zip(self.labels[place], dims, strict=True) if one}
        for x, labels in zip(self.operands, self.labels, strict=True):
            for label, size in zip(labels, x.shape, strict=True):
                if size > 1 and label not in axes:
                    axes[label] = table.add_axis(size)
        a, b = (
            tuple(axes[label] if size > 1 else () for label, size in zip(labels, x.shape, strict=True))
            for x, labels in zip(self.operands, self.labels, strict=True)
        )
        return a, b, tuple(axes.get(label, ()) for label in self.result)


def label_product(name: str, args: Any, kwargs: Any) -> LabelledProduct | None:
    """Return what a product function of this name computes; None if it has not two operands or is of another kind."""
    core = strip_affixes(name)
    operands = find_operands(name, args, kwargs)
    if len(operands) != 2:
        return None
    a, b = operands if core != "rmatmul" else operands[::-1]
    if core in ("matmul", "rmatmul", "mm", "bmm", "mv", "dot", "vdot"):
        return label_matmul(a, b)
    if core in ADDED:
        beta, alpha = float(kwargs.get("beta", 1)), float(kwargs.get("alpha", 1))
        start = args[0] if args else kwargs.get("input")
        return label_matmul(a, b)._replace(factor=alpha, added=None if beta == 0 else (start, beta))
    if core in ("linear", "inner"):
        first, second = number_labels(a, "a"), number_labels(b, "b")
        first[-1] = second[-1] = "sum"
        bias = (args[2] if len(args) > 2 else kwargs.get("bias")) if core == "linear" else None
        return LabelledProduct((a, b), (first, second), first[:-1] + second[:-1], 1.0, None if bias is None else (bias, 1.0))
    if core == "einsum" and args and isinstance(args[0], str):
        return label_einsum(args[0], a, b)
    return label_tensordot(a, b, args[2] if len(args) > 2 else kwargs.get("dims", 2)) if core == "tensordot" else None


def number_labels(x: Tensor, prefix: str) -> Labels:
    """Return a label of its own for each dimension."""
    return [(prefix, n) for n in range(x.dim())]


def label_matmul(a: Tensor, b: Tensor) -> LabelledProduct:
    """Return the labels of torch.matmul: numbers from the right for batch dimensions, which broadcast."""
    first: Labels = ["sum"] if a.dim() == 1 else [*range(2 - a.dim(), 0), "row", "sum"]
    second: Labels = ["sum"] if b.dim() == 1 else [*range(2 - b.dim(), 0), "sum", "column"]
    batch: Labels = [*range(2 - max(a.dim(), b.dim(), 2), 0)]
    return LabelledProduct((a, b), (first, second), batch + ["row"] * (a.dim() > 1) + ["column"] * (b.dim() > 1))


def label_einsum(equation: str, a: Tensor, b: Tensor) -> LabelledProduct | None:
    """Return the labels of an einsum of two operands; None if an operand has a letter twice."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != 2:
        return None
    if not arrow:
        letters = [letter for letter in left if letter in string.ascii_letters]
        right = "..." * ("..." in left) + "".join(sorted(letter for letter in letters if letters.count(letter) == 1))
    first, second = (label_term(term, x.dim()) for term, x in zip(terms, (a, b), strict=True))
    if len(set(first)) < len(first) or len(set(second)) < len(second):
        return None
    ellipsis_labels = sorted({label for label in (*first, *second) if isinstance(label, int)})
    result: Labels = []
    for part in right.replace("...", " ").partition(" "):
        result += ellipsis_labels if part == " " else list(part)
    return LabelledProduct((a, b), (first, second), result)


def label_term(term: str, rank: int) -> Labels:
    """Return the labels of one term of an einsum: its letters, and numbers from the right for an ellipsis."""
    before, dots, after = term.partition("...")
    if not dots:
        return list(before)
    return [*before, *range(len(term) - 3 - rank, 0), *after]


def label_sum(weights: Tensor, values: Tensor, name: str, args: Any, kwargs: Any, x: Tensor) -> LabelledProduct | None:
    """Return the product that the sum of x, weights times values entry by entry, amounts to; None for another function."""
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    summed = {n % x.dim() for n in ([dim] if isinstance(dim, int) else dim or range(x.dim()))}
    if strip_affixes(name) != "sum":
        return None
    labels = [[*range(x.dim() - one.dim(), x.dim())] for one in (weights, values)]
    return LabelledProduct((weights, values), (labels[0], labels[1]), [n for n in range(x.dim()) if n not in summed])


def label_tensordot(a: Tensor, b: Tensor, dims: Any) -> LabelledProduct | None:
    """Return the labels of torch.tensordot; None if its dims are neither a number nor two lists."""
    first, second = number_labels(a, "a"), number_labels(b, "b")
    if isinstance(dims, int):
        pairs: Sequence[tuple[int, int]] = [(a.dim() - dims + n, n) for n in range(dims)]
    elif isinstance(dims, tuple | list) and len(dims) == 2 and not isinstance(dims[0], int):
        pairs = list(zip(dims[0], dims[1], strict=True))
    else:
        return None
    for n, (one, other) in enumerate(pairs):
        first[one] = second[other] = ("sum", n)
    return LabelledProduct((a, b), (first, second), [x for x in (*first, *second) if x[0] != "sum"])  # type: ignore[index]
