"""Scans over vectors in rounds: states h_i = a_i h_(i - 1) + b_i of all tokens at once.

Rounds multiply parts of the states by parts of the decays (https://doi.org/10.1145/7902.7903): the first one shows both, and
the states are a later tensor that satisfies the recurrence. Scans by running sums are in running_sums.py.
"""

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.observe.interception.function_roles import Role
from regard.observe.interception.handwritten.ancestors.ancestor_search import has_tokens
from regard.observe.interception.handwritten.ancestors.windows import TOKEN_CUTS
from regard.observe.interception.handwritten.products.score_form import PERMUTES, PRODUCTS, VIEWS
from regard.observe.interception.handwritten.recurrences.followed_function import FollowedFunction
from regard.observe.interception.handwritten.recurrences.state_log import StateLog
from regard.observe.interception.handwritten.recurrences.state_loop import MIN_TOKENS, Product, Shifted
from regard.observe.interception.handwritten.recurrences.state_scans import is_scan
from regard.observe.interception.handwritten.recurrences.token_order import has_other_order
from regard.observe.interception.lookups import IS_TENSOR
from regard.observe.interception.provenance import ModuleFrame

MAX_PAIRS = 4  # of decays and what is written, of a module
MAX_TRIES = 64  # of tensors that may be the states of a pair
MAX_STEPS = 8  # of views from a part of a tensor to the whole
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


class ScanRounds:
    """The scans of one forward that join states in rounds."""

    def __init__(self, log: StateLog) -> None:
        self.log = log
        self.pairs: list[ScanPair] = []

    def clear(self) -> None:
        """Forget all scans."""
        self.pairs.clear()

    def may_start(self, role: Role | None, args: Any) -> bool:
        """Return whether a function multiplies parts of two tensors, as the first round of a scan does: quick."""
        if role is not Role.MULTIPLY or len(self.pairs) >= MAX_PAIRS:
            return False
        tensors = [*filter(IS_TENSOR, args)][-2:]
        if len(tensors) < 2 or tensors[0].shape != tensors[1].shape or not (is_part(tensors[0]) and is_part(tensors[1])):
            return False
        return tensors[0]._base is None or tensors[0]._base is not tensors[1]._base

    def start(self, frame: ModuleFrame, args: Any, name: str) -> None:
        """Keep the two tensors that the operands of a product are parts of, with all features and the tokens of a module."""
        parts = [*filter(IS_TENSOR, args)][-2:]
        one, other = ([y for y in find_wholes(frame, x) if y.shape[-1] == x.shape[-1]] for x in parts)
        lengths = frame.list_lengths()
        for x in one:
            for y in other:
                if max(x.shape, default=0) >= min(lengths, default=1) and self.add_pair(frame, x, y, name):
                    return

    def add_pair(self, frame: ModuleFrame, x: Tensor, y: Tensor, name: str) -> bool:
        """Keep two tensors that may be decays and what is written, in either order; return whether they may be."""
        is_known = any(x.shape == pair.decays.shape and pair.frame is frame for pair in self.pairs)
        if x is y or x.shape != y.shape or is_known or len(self.pairs) >= MAX_PAIRS:
            return False
        if any(isinstance(self.log.find(each), Product) for each in (x, y)):
            return False  # whose states are matrices
        if not any(has_tokens(frame, each) for each in (x, y)) or any(has_other_order(frame, each) for each in (x, y)):
            return False
        self.pairs.append(ScanPair(frame, x.detach().clone(), y.detach().clone(), name))
        return True

    def follow_shift(self, call: FollowedFunction) -> None:
        """Follow a tensor that padding moves by one token; its product with another tensor begins the first round of a scan."""
        y, tensors = call.y, [*filter(IS_TENSOR, call.args)][-2:]
        if not isinstance(y, Tensor) or not tensors:
            return
        if call.core == "pad":
            axis, x = find_shifted_axis(call), tensors[0]
            wholes = [one for one in (x, *find_wholes(call.frame, x)) if one.shape == y.shape]
            whole = wholes[0] if wholes else x  # with one more token, which is cut next
            if axis is not None and not isinstance(self.log.find(whole), Product):
                self.log.put(y, Shifted(whole, axis))
            return
        found = [trace if isinstance(trace := call.find(x), Shifted) else None for x in tensors]
        if call.core in TOKEN_CUTS and found[0] is not None:
            is_start = y.data_ptr() == tensors[0].data_ptr() and y.shape == found[0].whole.shape
            if is_start:
                self.log.put(y, found[0])
        elif call.core in (*PRODUCTS, "addcmul") and len(tensors) == 2 and (found[0] is None) != (found[1] is None):
            other, shifted = (tensors[1], found[0]) if found[0] is not None else (tensors[0], found[1])
            if shifted is not None and shifted.whole is not other and other.shape == shifted.whole.shape:
                self.add_pair(call.frame, other, shifted.whole, call.core)

    def follow_joined(self, call: FollowedFunction) -> None:
        """Follow the tokens of a tensor but the last one, joined behind one other token, as that tensor moved by a token."""
        axis, y = call.read_argument("dim", 1, 0), call.y
        if not may_shift(call.args) or type(axis) is not int or call.core == "stack":
            return
        first, rest = call.args[0]
        wholes = (x for x in find_wholes(call.frame, rest) if x.shape == y.shape and x.data_ptr() == rest.data_ptr())
        whole = next(wholes, None) if first.shape[axis] == 1 else None
        if whole is not None and not isinstance(self.log.find(whole), Product):
            self.log.put(y, Shifted(whole, axis % y.dim()))

    def find_states(self, frame: ModuleFrame, x: Tensor) -> None:
        """Keep a tensor if it holds the states of all tokens of a pair of decays and what is written."""
        for pair in self.pairs:
            if pair.frame is frame and pair.found is None and pair.tries < MAX_TRIES and x.dim() == pair.decays.dim():
                pair.found = find_scan(pair, x, frame.list_lengths())

    def take(self, frame: ModuleFrame) -> list[ChannelScan]:
        """Return the scans of a module that ends, and forget them."""
        found = [one.found for one in self.pairs if one.frame is frame and one.found is not None]
        self.pairs[:] = [one for one in self.pairs if one.frame is not frame]
        return found


def may_shift(args: Any) -> bool:
    """Return whether a function joins a few tokens with a part of a tensor, as where that is moved by one token: quick."""
    parts = args[0] if args else ()
    if not isinstance(parts, list | tuple) or len(parts) != 2 or not all(map(IS_TENSOR, parts)):
        return False
    first, rest = parts
    return first.dim() == rest.dim() > 1 and first.numel() < rest.numel() and is_part(rest)


def is_part(x: Tensor) -> bool:
    """Return whether a tensor is a view of another one with more entries."""
    if x._base is not None or not x.is_inference():
        return x._base is not None
    has_memory = x.layout is torch.strided and not torch._C._functorch.is_batchedtensor(x)
    return has_memory and x.untyped_storage().nbytes() > x.numel() * x.element_size()


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


def find_shifted_axis(call: FollowedFunction) -> int | None:
    """Return the axis along which a padding adds one entry at the start, and none elsewhere; None if it does not."""
    sizes, x = call.read_argument("pad", 1, ()), call.args[0]
    pairs = [*zip(sizes[::2], sizes[1::2], strict=False)] if isinstance(sizes, list | tuple) else []
    padded = [n for n, pair in enumerate(pairs) if pair not in ((0, 0), [0, 0])]
    if len(padded) != 1 or pairs[padded[0]] not in ((1, 0), (1, -1)) or padded[0] >= x.dim():
        return None
    return int(x.dim()) - 1 - padded[0]


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
