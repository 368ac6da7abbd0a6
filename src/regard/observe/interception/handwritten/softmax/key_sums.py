"""Sums over keys in a loop: columns of a softmax, each multiplied with the values of its key, are added up one by one."""

import string
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from regard.observe.interception.function_roles import strip_affixes
from regard.observe.interception.handwritten.ancestors.ancestor_search import MAX_STEPS
from regard.observe.interception.handwritten.products.labelled_product import LabelledProduct, label_entries
from regard.observe.interception.handwritten.products.traces import Trace, TraceKind, share_memory
from regard.observe.interception.provenance import ModuleFrame
from regard.observe.interception.tensor_arguments import find_tensors

SUMS_OF_TWO = {"add", "addcmul", "radd", "iadd"}
KEY = "key"  # the label of the keys
FindTrace = Callable[[Tensor], Trace | None]


class KeySum(NamedTuple):
    """A sum of columns of weights times values (..., e), by the number of the key, and the axis of keys among the weights.

    `product` is that of the first column with its values.
    """

    weights: Tensor
    axis: int
    product: LabelledProduct
    values: dict[int, Tensor]

    @property
    def is_complete(self) -> bool:
        """Whether it has all columns."""
        return len(self.values) == self.weights.shape[self.axis]

    def join(self, other: "KeySum") -> "KeySum | None":
        """Return the sum of both; None if they have a column in common, or other weights."""
        is_other = self.weights is not other.weights or self.product.labels != other.product.labels
        if is_other or not self.values.keys().isdisjoint(other.values):
            return None
        return self._replace(values=self.values | other.values)

    def build_einsum(self, frame: ModuleFrame) -> tuple[str, Tensor, Tensor]:
        """Return the arguments of the einsum of the weights with the values of all keys, which are joined in a module's log."""
        column, (of_column, of_value) = self.product.operands[0], self.product.labels
        labels = iter([label for label, size in zip(of_column, column.shape, strict=True) if size > 1])
        sizes = enumerate(self.weights.shape)
        own = [KEY if n == self.axis else next(labels) if size > 1 else ("one", n) for n, size in sizes]
        parts = [self.values[n] for n in range(len(self.values))]
        values = torch.stack([one.detach() for one in parts], -1)
        frame.log_operation((parts, -1), {}, values, "stack")
        known = dict.fromkeys([*own, *of_value, KEY, *self.product.result])
        letters = dict(zip(known, string.ascii_letters, strict=False))
        terms = ("".join(letters[one] for one in term) for term in (own, [*of_value, KEY], self.product.result))
        return "{},{}->{}".format(*terms), self.weights, values


class KeySums:
    """The sums over keys of the modules that run."""

    def __init__(self) -> None:
        self.sums = WeakTensorKeyDictionary()
        self.stacks = WeakTensorKeyDictionary()  # of products of columns, with the axis that they were stacked along
        self.unfinished: dict[int, tuple[Tensor, weakref.ref[ModuleFrame], Trace]] = {}  # weights, by their identity

    def clear(self) -> None:
        """Forget all sums."""
        self.sums.clear()
        self.stacks.clear()
        self.unfinished.clear()

    def start(self, frame: ModuleFrame, find: FindTrace, factors: tuple[Tensor, Tensor] | None, y: Tensor) -> None:
        """Follow y, the product of weights with values, if the weights are a column of a softmax that is followed."""
        found = None if factors is None else read_column(frame, find, *factors)
        if found is not None:
            self.sums[y] = found
            trace = find(found.weights)
            if trace is not None and trace.pairs:
                self.note(frame, trace, found.weights)

    def add(self, frame: ModuleFrame, find: FindTrace, name: str, args: Any, kwargs: Any, y: Tensor) -> KeySum | None:
        """Return the sum over keys that a function of sums over keys makes, or stacks to y; None for another function."""
        core, tensors = strip_affixes(name), find_tensors(args, {})
        if core == "sum" and tensors and tensors[0] in self.stacks:
            stacked, axis = self.stacks[tensors[0]]
            dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
            is_same = type(dim) is int and dim % tensors[0].dim() == axis and y.dim() < tensors[0].dim()
            return self.put(stacked, y) if is_same else None
        parts = [(x, self.sums[x]) for x in tensors if x in self.sums]
        if core == "addcmul" and len(tensors) == 3 and not kwargs:
            column = read_column(frame, find, tensors[1], tensors[2]) or read_column(frame, find, tensors[2], tensors[1])
            parts = parts[:1] if column is None else [*parts[:1], (tensors[1] * tensors[2], column)]
            tensors = tensors[:2]
        if not parts or core not in SUMS_OF_TWO | {"stack"} or (kwargs and core != "stack"):
            return None
        joined: KeySum | None = parts[0][1]
        for _, one in parts[1:]:
            joined = None if joined is None else joined.join(one)
        if joined is None or (len(parts) < len(tensors) and (core == "stack" or not torch.equal(y, parts[0][0]))):
            return None  # something else than 0 was added, too
        if core == "stack":
            self.stacks[y] = joined, kwargs.get("dim", args[1] if len(args) > 1 else 0) % y.dim()
            return joined
        return self.put(joined, y)

    def put(self, found: KeySum, y: Tensor) -> KeySum:
        """Follow y as a sum over keys."""
        self.sums[y] = found
        return found

    def note(self, frame: ModuleFrame, trace: Trace, weights: Tensor) -> None:
        """Note that columns of weights were multiplied with values, so that they are missed if their sum does not get all."""
        self.unfinished[id(weights)] = weights, weakref.ref(frame), trace

    def finish(self, weights: Tensor) -> None:
        """Forget weights that a product or a sum completes."""
        self.unfinished.pop(id(weights), None)

    def take_unfinished(self, frame: ModuleFrame) -> list[Trace]:
        """Return the weights of a module that ends whose columns were not all added up, and forget them."""
        ended = [number for number, (_, one, _) in self.unfinished.items() if one() is frame]
        return [self.unfinished.pop(number)[2] for number in ended]


def read_column(frame: ModuleFrame, find: FindTrace, column: Tensor, value: Tensor) -> KeySum | None:
    """Return the sum of one column of weights times the values of its key; None if it is no column of a softmax."""
    found = find_column(frame, find, column) if column.layout is torch.strided else None
    if found is None:
        return None
    weights, axis, number = found
    return KeySum(weights, axis, label_entries(column, value), {number: value})


def find_column(frame: ModuleFrame, find: FindTrace, column: Tensor) -> tuple[Tensor, int, int] | None:
    """Return the weights of which a tensor is a column, the axis of their keys, and the number of its key; None for others."""
    ref = weakref.ref(column)
    for _ in range(MAX_STEPS):
        makers = frame.find_makers(ref)
        if len(makers) != 1 or not makers[0].given or makers[0].child is not None:
            return None
        ref = makers[0].given[0]
        weights = ref()
        trace = None if weights is None else find(weights)
        if weights is None or trace is None or trace.kind is not TraceKind.WEIGHTS:
            continue
        axis = next((n for n, axes in enumerate(trace.dims or ()) if axes and axes == trace.keys), None)
        if axis is not None and trace.extent == weights.shape[axis]:
            number = find_number(weights, axis, column)
            return None if number is None else (weights, axis, number)
    return None


def find_number(weights: Tensor, axis: int, column: Tensor) -> int | None:
    """Return the number of a column that is a view of weights, along the axis of their keys; None for other tensors."""
    own = [(size, step) for n, (size, step) in enumerate(zip(weights.shape, weights.stride(), strict=True)) if n != axis]
    found = [one for one in zip(column.shape, column.stride(), strict=True) if one[0] > 1]
    if found != [one for one in own if one[0] > 1] or not weights.stride(axis):
        return None
    if not share_memory(weights, column):
        return None
    number, rest = divmod(int(column.storage_offset()) - int(weights.storage_offset()), weights.stride(axis))
    return number if not rest and 0 <= number < weights.shape[axis] else None
