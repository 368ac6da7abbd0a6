"""Tensors that are followed through a forward: scores, weights, and values multiplied with weights."""

import weakref
from enum import IntEnum
from typing import Any, NamedTuple

from torch import Tensor

from regard.observe.interception.provenance import has_own_data, is_in_place


class TraceKind(IntEnum):
    """What a followed tensor is."""

    SCORES = 0
    WEIGHTS = 1
    WEIGHTED = 2  # values times weights, not yet summed


class Trace(NamedTuple):
    """The properties of a followed tensor."""

    tensor: "weakref.ref[Tensor]"
    kind: TraceKind
    pairs: bool  # whether the scores are of pairs of tokens
    roots: int  # one bit for each product and softmax that it was made by
    size: int  # entries of the weights before they were repeated
    extent: int = 0  # length of the axis of the softmax; 0 if unknown
    shared: bool = False  # whether several rows of weights share the values
    function: str = ""  # that turned scores into weights


Traced = tuple[Tensor, Trace]


class Traces:
    """The followed tensors by id, held by weak references."""

    def __init__(self) -> None:
        self.traces: dict[int, Trace] = {}  # by the tensor's id
        self.count = 0

    def clear(self) -> None:
        """Forget all followed tensors."""
        self.traces.clear()
        self.count = 0

    def find(self, x: Tensor) -> Trace | None:
        """Return the trace of a tensor; None if it is not followed."""
        found = self.traces.get(id(x))
        return found if found is not None and found.tensor() is x else None

    def find_all(self, tensors: list[Tensor]) -> list[Traced]:
        """Return those of the tensors that are followed, with their traces."""
        return [(x, trace) for x in tensors if (trace := self.find(x)) is not None] if self.traces else []

    def follow(self, x: Tensor, trace: Trace, name: str = "") -> None:
        """Follow a tensor, and its base if the function of this name wrote into it."""
        self.put(x, trace)
        if name and is_in_place(name) and x._base is not None:
            self.put(x._base, trace)

    def put(self, x: Tensor, trace: Trace) -> None:
        """Store the trace of a tensor until the tensor is freed."""
        key, traces = id(x), self.traces

        def forget(gone: "weakref.ref[Tensor]") -> None:
            if key in traces and traces[key].tensor is gone:
                del traces[key]

        traces[key] = trace._replace(tensor=weakref.ref(x, forget))

    def drop(self, x: Tensor) -> None:
        """Stop following a tensor."""
        self.traces.pop(id(x), None)

    def start(self, x: Tensor, kind: TraceKind, pairs: bool, roots: int = 0, **known: Any) -> None:
        """Start following a tensor that a product or a softmax has just made."""
        self.count += 1
        self.follow(x, Trace(weakref.ref(x), kind, pairs, roots | 1 << self.count, x.numel(), **known))


def join_roots(traced: list[Traced]) -> int:
    """Return the union of the roots of several tensors."""
    roots = 0
    for _, trace in traced:
        roots |= trace.roots
    return roots


def is_followable(x: Any) -> bool:
    """Return whether a value is a floating-point tensor with numbers of its own, and not nested."""
    return isinstance(x, Tensor) and has_own_data(x) and not x.is_nested and x.is_floating_point()
