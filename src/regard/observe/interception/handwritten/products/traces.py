"""Tensors that are followed through a forward: scores, weights, and values multiplied with weights."""

import weakref
from enum import IntEnum
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.observe.interception.function_roles import Role, infer_role
from regard.observe.interception.handwritten.products.score_form import ScoreForm
from regard.observe.interception.handwritten.products.tensor_axes import Axes, AxisTable, Dims
from regard.observe.interception.lookups import read_version
from regard.observe.interception.plain_tensors import is_distributed, is_readable
from regard.observe.interception.provenance import is_in_place


class TraceKind(IntEnum):
    """What a followed tensor is."""

    SCORES = 0
    WEIGHTS = 1
    WEIGHTED = 2  # values times weights, not yet summed


class MovedEntries(NamedTuple):
    """The places of a tensor's entries in the tensor that they were moved from, with the axes and the form of that."""

    places: Tensor  # float64, of the tensor's shape
    dims: Dims
    form: ScoreForm | None
    shift: Tensor | None = None  # (..., 1), what was added to its rows since they were moved
    is_owned: bool = False  # whether no other tensor shares the places, so that they can be written into


class ActivatedScores(NamedTuple):
    """The formula of scores, and the functions that turned each of them into a weight, in order."""

    form: ScoreForm
    functions: tuple[str, ...]


class Trace(NamedTuple):
    """The properties of a followed tensor."""

    tensor: "weakref.ref[Tensor]"
    kind: TraceKind
    pairs: bool  # whether the scores are of pairs of tokens
    roots: int  # one bit for each product and softmax that it was made by
    size: int  # entries of the weights before they were repeated
    extent: int = 0  # length of the axis of the softmax; 0 if unknown
    function: str = ""  # that turned scores into weights
    dims: Dims | None = None  # the axes of its dimensions; None if a function rearranged them
    form: ScoreForm | None = None  # the formula of its scores; None if it is not known
    relative: ScoreForm | None = None  # their formula if they are no scores by themselves, but a term of relative positions
    unmixed: ScoreForm | None = None  # the formula of its scores before their heads were mixed
    keys: Axes | None = None  # the axes of the softmax
    undropped: tuple[Tensor, Dims | None] | None = None  # the weights before dropout
    factors: tuple[Tensor, Tensor] | None = None  # the weights and the values that were multiplied entry by entry
    writes: int = 0  # into the factors, before they were multiplied
    eps: float = 0.0  # the coarsest rounding on the way
    moved: MovedEntries | None = None  # where its entries come from, if functions moved them
    has_edits: bool = False  # whether a function that the formula leaves out may have changed single rows
    changes: tuple[str, ...] = ()  # functions after which the axes or the formula were not known
    activated: ActivatedScores | None = None  # the scores of weights that are no softmax
    parts: "tuple[Trace, ...]" = ()  # the softmaxes whose heads were mixed, or that were added up
    has_separate_sources: bool | None = None  # whether queries and keys were made from different tensors, if that was observed
    version: int = 0  # of the tensor's numbers

    @property
    def may_differ_by_row(self) -> bool:
        """Return whether a formula that holds for some rows of the weights need not hold for others."""
        return self.moved is not None or self.has_edits


Traced = tuple[Tensor, Trace]


def list_parts(trace: Trace) -> tuple[Trace, ...]:
    """Return the softmaxes that weights are made of, so that they can be found again where these are combined; or none."""
    if trace.parts or trace.kind is not TraceKind.WEIGHTS:
        return trace.parts
    return (trace,) if (trace.form or trace.unmixed) is not None and infer_role(trace.function) is Role.SOFTMAX else ()


class Traces:
    """The followed tensors by id, held by weak references."""

    def __init__(self) -> None:
        self.traces: dict[int, Trace] = {}  # by the tensor's id
        self.table = AxisTable()
        self.count = 0

    def clear(self) -> None:
        """Forget all followed tensors."""
        self.traces.clear()
        self.table.clear()
        self.count = 0

    def find(self, x: Tensor) -> Trace | None:
        """Return the trace of a tensor; None if it is not followed."""
        trace = self.traces.get(id(x))
        return trace if trace is not None and trace.tensor() is x else None

    def mark_edits(self, name: str, tensors: list[Tensor], results: list[Tensor]) -> list[Traced]:
        """Mark the followed tensors that a function of this name wrote into by another one, and its arguments if others did.

        Return those of its arguments that are followed, with their traces.
        """
        traced, writes, has_edits = self.find_all(tensors), is_in_place(name), False
        for x, trace in traced:
            own = writes and any(x is y for y in results)  # once
            if read_version(x) - trace.version > own:
                self.put(x, trace._replace(has_edits=True))
                has_edits = True
        for x, _ in self.find_all(tensors[:1]) if writes else ():
            for trace in [*self.traces.values()]:  # x.data, and all tensors of inference mode, have no version in common
                other = trace.tensor()
                if other is not None and other is not x and share_memory(other, x):
                    self.put(other, trace._replace(has_edits=True))
                    has_edits = True
        return self.find_all(tensors) if has_edits else traced

    def find_all(self, tensors: list[Tensor]) -> list[Traced]:
        """Return those of the tensors that are followed, with their traces."""
        traces = self.traces
        if not traces:
            return []
        return [(x, trace) for x in tensors if (trace := traces.get(id(x))) is not None and trace.tensor() is x]

    def follow(self, x: Tensor, trace: Trace, name: str = "") -> None:
        """Follow a tensor, and its base if the function of this name wrote into it."""
        self.put(x, trace)
        if name and is_in_place(name) and x._base is not None:
            changes = (*trace.changes, name)
            unknown = trace._replace(dims=None, form=None, relative=None, moved=None, activated=None, parts=())
            self.put(x._base, unknown._replace(changes=changes))

    def put(self, x: Tensor, trace: Trace) -> None:
        """Store the trace of a tensor until the tensor is freed."""
        key, traces = id(x), self.traces

        def forget(gone: "weakref.ref[Tensor]") -> None:
            if key in traces and traces[key].tensor is gone:
                del traces[key]

        eps = max(trace.eps, read_eps(x.dtype))
        traces[key] = trace._replace(tensor=weakref.ref(x, forget), eps=eps, version=read_version(x))

    def drop(self, x: Tensor) -> None:
        """Stop following a tensor."""
        self.traces.pop(id(x), None)

    def start(self, x: Tensor, kind: TraceKind, pairs: bool, roots: int = 0, **known: Any) -> None:
        """Start following a tensor that a product or a softmax has just made."""
        self.count += 1
        self.follow(x, Trace(weakref.ref(x), kind, pairs, roots | 1 << self.count, x.numel(), **known))


@cache
def read_eps(dtype: torch.dtype) -> float:
    """Return the rounding of a dtype at 1."""
    return torch.finfo(dtype).eps


def share_memory(x: Tensor, y: Tensor) -> bool:
    """Return whether two tensors have the same storage; False if one is distributed."""
    if is_distributed(x) or is_distributed(y):
        return False
    return x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()


def join_roots(traced: list[Traced]) -> int:
    """Return the union of the roots of several tensors."""
    roots = 0
    for _, trace in traced:
        roots |= trace.roots
    return roots


def is_followable(x: Any) -> bool:
    """Return whether a value is a floating-point tensor with numbers on this rank, and not nested."""
    return isinstance(x, Tensor) and is_readable(x) and not x.is_nested and x.is_floating_point()
