"""Scans over vectors: states h_i = a_i h_(i - 1) + b_i of all tokens at once, by running sums or in rounds.

Running sums add up what tokens write over the decays so far, and multiply by these, or do so with the logarithms of all
(https://arxiv.org/abs/2311.06281). Rounds multiply parts of the states by parts of the decays (https://doi.org/10.1145/7902.7903):
the first one shows both, and the states are a later tensor that satisfies the recurrence.
"""

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.observe.interception.function_roles import Role
from regard.observe.interception.handwritten.ancestors.ancestor_search import find_ancestors, has_tokens
from regard.observe.interception.handwritten.ancestors.windows import TOKEN_CUTS
from regard.observe.interception.handwritten.products.score_form import COPIES, PERMUTES, PRODUCTS, QUOTIENTS, VIEWS
from regard.observe.interception.handwritten.recurrences.channel_states import ChannelStates
from regard.observe.interception.handwritten.recurrences.state_loop import MIN_TOKENS, Product, RunningSum, SumKind, Trace
from regard.observe.interception.handwritten.recurrences.state_scans import is_scan
from regard.observe.interception.handwritten.softmax.divided_exponentials import EXPONENTIALS
from regard.observe.interception.lookups import IS_TENSOR, RUNNING
from regard.observe.interception.provenance import WEIGHT, ModuleFrame, Operation

MAX_PAIRS = 4  # of decays and what is written, of a module
MAX_TRIES = 64  # of tensors that may be the states of a pair
MAX_STEPS = 8  # of views from a part of a tensor to the whole
REVERSALS = {"flip", "fliplr", "flipud", "rot90", "sort", "msort", "argsort", "take", "masked_select", "index_put"}
CUTS_OR_VIEWS = VIEWS | PERMUTES | TOKEN_CUTS


@dataclass(eq=False)
class ChannelScan:
    """The states (b, t, ...) of a scan along an axis, its decays and what it writes, or the logarithms of all."""

    frame: ModuleFrame
    function: str
    states: Tensor
    decays: Tensor
    written: Tensor
    axis: int
    are_logs: bool = False


@dataclass(eq=False)
class ScanPair:
    """What may be the decays of a scan and what it writes, as they were before its first round."""

    frame: ModuleFrame
    decays: Tensor
    written: Tensor
    function: str
    found: ChannelScan | None = None
    tries: int = 0  # tensors that were compared with its recurrence


class ChannelScans(ChannelStates):
    """The states of the loops and of the scans of one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.channel_scans: list[ChannelScan] = []
        self.pairs: list[ScanPair] = []

    def clear(self) -> None:
        """Forget all loops and scans."""
        super().clear()
        self.channel_scans.clear()
        self.pairs.clear()

    # Running sums

    def start_running(
        self, frames: list[ModuleFrame], core: str, args: Any, kwargs: Any, trace: RunningSum | None, y: Tensor
    ) -> None:
        """Follow y, the running sum or product of a tensor along its tokens."""
        x, axis = args[0], kwargs.get("dim", args[1] if len(args) > 1 else None)
        if type(axis) is not int or x.dim() < 2 or x.shape[axis] not in frames[-1].list_lengths():
            return
        axis %= x.dim()
        if trace is not None:
            kinds = {("cumsum", SumKind.TERMS): SumKind.SUMS, ("logcumsumexp", SumKind.LOG_TERMS): SumKind.LOG_SUMS}
            kind = kinds.get((core, trace.kind))
            if kind is not None and axis == trace.axis:
                self.put(y, trace._replace(kind=kind))
        elif core not in ("cumsum", "cumprod") or not x.is_floating_point():
            return
        elif has_tokens(frames[-1], x) and not has_other_order(frames[-1], x):
            self.put(y, RunningSum(SumKind.LOGS if core == "cumsum" else SumKind.DECAYS, x.detach(), core == "cumsum", axis))

    def follow_running(
        self, frames: list[ModuleFrame], name: str, core: str, args: Any, kwargs: Any, traces: dict[int, Trace], y: Any
    ) -> None:
        """Follow a function of running sums."""
        pairs = [(x, trace if isinstance(trace := traces.get(id(x)), RunningSum) else None) for x in args]
        first = pairs[0][1] if pairs else None
        if core in RUNNING:
            self.start_running(frames, core, args, kwargs, first, y)
        elif len(args) == 1 and first is not None and core in (*COPIES, "neg", *EXPONENTIALS):
            if core in EXPONENTIALS and first.kind is SumKind.LOGS:
                self.put(y, first._replace(kind=SumKind.DECAYS))
            elif core == "neg" and first.kind is SumKind.LOGS:
                self.put(y, first._replace(sign=-first.sign))
            elif core in COPIES:
                self.put(y, first)
        elif len(args) == 2 and not kwargs and core in (*PRODUCTS, *QUOTIENTS, "add", "sub", "subtract"):
            flip = -1 if core in (*QUOTIENTS, "sub", "subtract") else 1
            pairs = pairs[::-1] if name.startswith("__r") and flip < 0 else pairs
            is_log = core in ("add", "sub", "subtract")
            self.join_sums(frames, is_log, pairs, flip, y)

    def join_sums(self, frames: list[ModuleFrame], is_log: bool, pairs: Any, flip: int, y: Tensor) -> None:
        """Follow the product of decays with what is written, or with the running sums of that, or the sum of the logarithms."""
        decays, terms, ends = (
            (SumKind.LOGS, SumKind.LOG_TERMS, SumKind.LOG_SUMS) if is_log else (SumKind.DECAYS, SumKind.TERMS, SumKind.SUMS)
        )
        orders = [(pairs[1], pairs[0], flip)] if flip < 0 else [(*pairs, 1), (*pairs[::-1], 1)]
        for (_, trace), (other, ended), sign in orders:
            if trace is None or trace.kind is not decays:
                continue
            sign *= trace.sign
            if ended is not None and ended.kind is ends and sign == -ended.sign and ended.decays is trace.decays:
                self.add_scan(frames, y, ended, is_log, sign)
            elif ended is None and self.can_be_written(frames[-1], other, y):
                self.put(y, trace._replace(kind=terms, sign=sign, written=other.detach()))
            return

    def can_be_written(self, frame: ModuleFrame, x: Any, y: Tensor) -> bool:
        """Return whether x can be what tokens write, in their order, of which y was made."""
        return isinstance(x, Tensor) and x.shape == y.shape and not has_other_order(frame, x)

    def add_scan(self, frames: list[ModuleFrame], y: Tensor, summed: RunningSum, is_log: bool, sign: int) -> None:
        """Keep y, or its exponentials, as the states of a scan."""
        decays, written = summed.decays, summed.written
        assert written is not None
        if sign < 0:
            decays = -decays if summed.is_log else decays.reciprocal()
        if is_log != summed.is_log:
            decays = decays.log() if is_log else decays.exp()
        function = "logcumsumexp" if is_log else "cumsum"
        self.channel_scans.append(ChannelScan(frames[-1], function, y.detach().clone(), decays, written, summed.axis, is_log))

    # Rounds

    def may_start_rounds(self, role: Role | None, args: Any) -> bool:
        """Return whether a function multiplies parts of two tensors, as the first round of a scan does: quick."""
        if role is not Role.MULTIPLY or len(self.pairs) >= MAX_PAIRS:
            return False
        tensors = [*filter(IS_TENSOR, args)][-2:]
        if len(tensors) < 2 or tensors[0].shape != tensors[1].shape or not (is_part(tensors[0]) and is_part(tensors[1])):
            return False
        return tensors[0]._base is None or tensors[0]._base is not tensors[1]._base

    def start_rounds(self, frames: list[ModuleFrame], args: Any, name: str) -> None:
        """Keep the two tensors that the operands of a product are parts of, with all features and the tokens of a module."""
        parts = [*filter(IS_TENSOR, args)][-2:]
        one, other = ([y for y in find_wholes(frames[-1], x) if y.shape[-1] == x.shape[-1]] for x in parts)
        lengths = frames[-1].list_lengths()
        for x in one:
            for y in other:
                is_known = any(x.shape == pair.decays.shape and pair.frame is frames[-1] for pair in self.pairs)
                if x is y or x.shape != y.shape or is_known or max(x.shape, default=0) < min(lengths, default=1):
                    continue
                if any(isinstance(self.find(each), Product) for each in (x, y)):
                    continue  # whose states are matrices
                if any(has_tokens(frames[-1], each) for each in (x, y)) and not any(
                    has_other_order(frames[-1], each) for each in (x, y)
                ):
                    self.pairs.append(ScanPair(frames[-1], x.detach().clone(), y.detach().clone(), name))
                    return

    def find_states(self, frames: list[ModuleFrame], x: Tensor) -> None:
        """Keep a tensor if it holds the states of all tokens of a pair of decays and what is written."""
        frame = frames[-1]
        for pair in self.pairs:
            if pair.frame is frame and pair.found is None and pair.tries < MAX_TRIES and x.dim() == pair.decays.dim():
                pair.found = find_scan(pair, x, frame.list_lengths())

    def take_channel_scans(self, frame: ModuleFrame) -> list[ChannelScan]:
        """Return the scans over vectors of a module that ends, and forget them."""
        found = [one.found for one in self.pairs if one.frame is frame and one.found is not None]
        self.pairs = [one for one in self.pairs if one.frame is not frame]
        ended = found + [one for one in self.channel_scans if one.frame is frame]
        self.channel_scans = [one for one in self.channel_scans if one.frame is not frame]
        return ended


def has_other_order(frame: ModuleFrame, x: Tensor) -> bool:
    """Return whether x was made of a tensor whose tokens may be in another order, which its map would have too."""
    moved = {id(y) for one in frame.list_operations() if may_move_tokens(frame, one) for y in one.results}
    return bool(moved) and not moved.isdisjoint(find_ancestors([frame], x))


def may_move_tokens(frame: ModuleFrame, operation: Operation) -> bool:
    """Return whether an operation may bring tokens to another order: a reversal or a look-up by an index.

    A look-up in a weight, along the features, or by an index that increases, does not.
    """
    name, lookup = operation.name.strip("_"), operation.lookup
    if name in REVERSALS:
        return True
    if lookup is None:  # an index that is a list has no shapes
        return name == "getitem" and operation.shapes is None
    if name == "embedding" or lookup.dim == -1 or frame.find_contents(operation.given[0]) == WEIGHT:
        return False
    rows = lookup.read_index()
    return rows is None or lookup.has_changed or bool((rows.diff() <= 0).any())


def is_part(x: Tensor) -> bool:
    """Return whether a tensor is a view of another one with more entries."""
    return x._base is not None or (x.is_inference() and x.untyped_storage().nbytes() > x.numel() * x.element_size())


def find_wholes(frame: ModuleFrame, x: Tensor) -> list[Tensor]:
    """Return the tensors that x is a part of, by views and indices, the nearest first."""
    found, one = list[Tensor](), weakref.ref(x)
    for _ in range(MAX_STEPS):
        maker = next((maker for maker in frame.find_makers(one) if maker.name.strip("_") in CUTS_OR_VIEWS), None)
        if maker is None or (whole := maker.given[0]()) is None or maker.given[0] is one:
            break
        one = maker.given[0]
        found.append(whole)
    return found


def find_scan(pair: ScanPair, x: Tensor, lengths: set[int]) -> ChannelScan | None:
    """Return the scan whose states x are, for decays and what is written, or the other way round; None if they are not.

    The tokens of both may be padded.
    """
    whole = pair.decays.shape
    if not x.is_floating_point() or not x.numel():
        return None
    own = [*enumerate(x.shape)][:-1]
    axes = [n for n, size in own if size in lengths and size >= MIN_TOKENS and size <= whole[n] < 2 * size]
    for axis in axes:
        if any(size != whole[n] for n, size in enumerate(x.shape) if n != axis):
            continue
        pair.tries += 1
        decays, written = (y.narrow(axis, 0, x.shape[axis]) for y in (pair.decays, pair.written))
        for a, b in ((decays, written), (written, decays)):
            if is_scan(x, a, b, axis) and not torch.equal(x, b):
                return ChannelScan(pair.frame, pair.function, x.detach().clone(), a, b, axis)
    return None
