"""Products of two tensors as an einsum has them: a label for each dimension of the operands and of the result."""

import math
import string
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from regard.observe.interception.function_roles import strip_affixes
from regard.observe.interception.handwritten.products.tensor_axes import AxisTable, Dims
from regard.observe.interception.tensor_arguments import find_tensors

Labels = list[Hashable]
ADDING_MATMULS = {"addmm", "addmv", "baddbmm"}  # whose first argument is added to the product
ADDING_PRODUCTS = ADDING_MATMULS | {"addbmm", "sspaddmm"}


class LabelledProduct(NamedTuple):
    """Two operands, the labels of their dimensions and of the result's, a factor, and what is added, with its own factor."""

    operands: tuple[Tensor, Tensor]
    labels: tuple[Labels, Labels]
    result: Labels
    factor: float = 1.0
    added: tuple[Tensor, float] | None = None

    def get_size(self, label: Hashable) -> int:
        """Return the size of the dimensions with a label, of which those of size 1 are broadcast."""
        operands = zip(self.operands, self.labels, strict=True)
        return max(x.shape[labels.index(label)] for x, labels in operands if label in labels)

    def sums_several(self) -> bool:
        """Return whether each entry of the result is a sum of several products."""
        labels = [label for one in self.labels for label in one if label not in self.result]
        return any(self.get_size(label) > 1 for label in labels)

    def sums_rows(self) -> bool:
        """Return whether several rows of one operand are summed, whatever the other one is."""
        labels = {*self.labels[0]} ^ {*self.labels[1]}
        return any(label not in self.result and self.get_size(label) > 1 for label in labels)

    def find_place(self, x: Tensor) -> int:
        """Return the place of an operand."""
        return 0 if self.operands[0] is x else 1

    def list_rows(self, place: int) -> Labels:
        """Return the labels of the result that only the operand at a place has."""
        return [label for label in self.labels[place] if label in self.result and label not in self.labels[1 - place]]

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


def find_operands(name: str, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors that a product multiplies, without its bias and its output."""
    core = strip_affixes(name)
    tensors = find_tensors(args, {name: x for name, x in kwargs.items() if name not in ("out", "bias", "input")})
    if "input" in kwargs and core not in ADDING_PRODUCTS:
        tensors.insert(0, kwargs["input"])
    if core in ADDING_PRODUCTS and args:
        tensors = tensors[1:]
    return [x for x in (tensors[:2] if core == "linear" else tensors) if x.is_floating_point()]


def label_product(name: str, operands: list[Tensor], args: Any, kwargs: Any) -> LabelledProduct | None:
    """Return what a product function of this name computes; None if it has not two operands or is of another kind."""
    core = strip_affixes(name)
    if len(operands) != 2:
        return None
    a, b = operands if core != "rmatmul" else operands[::-1]
    if core in ("matmul", "rmatmul", "mm", "bmm", "mv", "dot", "vdot"):
        return label_matmul(a, b)
    if core in ADDING_MATMULS:
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
    labels, result = label_terms(equation, [a, b])
    return LabelledProduct((a, b), (labels[0], labels[1]), result) if labels else None


def label_terms(equation: str, operands: Sequence[Tensor]) -> tuple[list[Labels], Labels]:
    """Return the labels of each operand of an einsum and of the result; none if an operand has a letter twice."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(operands):
        return [], []
    if not arrow:
        letters = [letter for letter in left if letter in string.ascii_letters]
        right = "..." * ("..." in left) + "".join(sorted(letter for letter in letters if letters.count(letter) == 1))
    labels = [label_term(term, x.dim()) for term, x in zip(terms, operands, strict=True)]
    if any(len(set(one)) < len(one) for one in labels):
        return [], []
    ellipsis_labels = sorted({label for one in labels for label in one if isinstance(label, int)})
    result: Labels = []
    for part in right.replace("...", " ").partition(" "):
        result += ellipsis_labels if part == " " else list(part)
    return labels, result


def label_term(term: str, rank: int) -> Labels:
    """Return the labels of one term of an einsum: its letters, and numbers from the right for an ellipsis."""
    before, dots, after = term.partition("...")
    if not dots:
        return list(before)
    return [*before, *range(len(term) - 3 - rank, 0), *after]


def label_entries(a: Tensor, b: Tensor) -> LabelledProduct:
    """Return the product of a and b entry by entry, which sums over no axis."""
    rank = max(a.dim(), b.dim())
    shapes = [[1] * (rank - x.dim()) + [*x.shape] for x in (a, b)]
    first, second = (
        list[Hashable](
            ("broadcast", place, n) if shapes[place][n] < shapes[1 - place][n] else n for n in range(rank - x.dim(), rank)
        )
        for place, x in enumerate((a, b))
    )
    return LabelledProduct((a, b), (first, second), [*range(rank)])


def label_sum(product: LabelledProduct, name: str, args: Any, kwargs: Any) -> LabelledProduct | None:
    """Return the product that the sum or the mean of a product's result amounts to; None for another function."""
    core = strip_affixes(name)
    if core not in ("sum", "mean"):
        return None
    dim, keeps = (kwargs.get(key, args[n] if len(args) > n else None) for n, key in ((1, "dim"), (2, "keepdim")))
    rank = len(product.result)
    summed = {n % rank for n in ([dim] if isinstance(dim, int) else dim or range(rank))}
    result = [("kept", n) if n in summed else label for n, label in enumerate(product.result) if keeps or n not in summed]
    terms = math.prod(product.get_size(product.result[n]) for n in summed) if core == "mean" else 1
    return product._replace(result=result, factor=product.factor / max(terms, 1))


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
