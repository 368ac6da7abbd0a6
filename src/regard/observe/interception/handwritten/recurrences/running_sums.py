"""Scans over vectors by running sums: states h_i = a_i h_(i - 1) + b_i of all tokens at once.

What tokens write over the decays so far is added up, and multiplied by these, or that is done with the logarithms of all
(https://arxiv.org/abs/2311.06281).
"""

from typing import Any

from torch import Tensor

from regard.observe.interception.handwritten.ancestors.ancestor_search import has_tokens
from regard.observe.interception.handwritten.products.score_form import COPIES, PRODUCTS, QUOTIENTS
from regard.observe.interception.handwritten.recurrences.channel_scans import ChannelScan
from regard.observe.interception.handwritten.recurrences.followed_function import FollowedFunction
from regard.observe.interception.handwritten.recurrences.running_means import RunningMean, find_mean, list_factors
from regard.observe.interception.handwritten.recurrences.state_log import StateLog
from regard.observe.interception.handwritten.recurrences.state_loop import RunningSum, SumKind
from regard.observe.interception.handwritten.recurrences.token_order import has_other_order
from regard.observe.interception.handwritten.softmax.divided_exponentials import EXPONENTIALS
from regard.observe.interception.lookups import RUNNING
from regard.observe.interception.provenance import ModuleFrame

BOUNDS = {"clamp", "clamp_min", "clip"}  # of sums that something is divided by
ADDS_DIMS = {"unsqueeze", "getitem", "view", "reshape"}


class RunningSums:
    """The running sums over tokens of one forward, and the scans and means that they amount to."""

    def __init__(self, log: StateLog) -> None:
        self.log = log
        self.scans: list[ChannelScan] = []
        self.means: list[RunningMean] = []

    def clear(self) -> None:
        """Forget all scans and means."""
        self.scans.clear()
        self.means.clear()

    def start(self, call: FollowedFunction, trace: RunningSum | None) -> None:
        """Follow the running sum or product of a tensor along its tokens."""
        core, y, x, axis = call.core, call.y, call.args[0], call.read_argument("dim", 1)
        if core == "cumsum" and self.log.has_product(y.shape):
            self.log.decay_shapes.add(y.shape)
            self.log.log_shapes.add(y.shape)
        if type(axis) is not int or x.dim() < 2 or x.shape[axis] not in call.frame.list_lengths():
            return
        axis %= x.dim()
        if trace is not None:
            kinds = {("cumsum", SumKind.TERMS): SumKind.SUMS, ("logcumsumexp", SumKind.LOG_TERMS): SumKind.LOG_SUMS}
            kind = kinds.get((core, trace.kind))
            if kind is not None and axis == trace.axis:
                self.log.put(y, trace._replace(kind=kind))
        elif core not in ("cumsum", "cumprod") or not x.is_floating_point():
            return
        elif has_tokens(call.frame, x) and not has_other_order(call.frame, x):
            is_log = core == "cumsum"
            factors = list_factors(call.frame, x) if is_log else ()
            kind = SumKind.LOGS if is_log else SumKind.DECAYS
            self.log.put(y, RunningSum(kind, x.detach(), is_log, axis, factors=factors))

    def follow_function(self, call: FollowedFunction) -> None:
        """Follow a function of running sums."""
        core, args, y = call.core, call.args, call.y
        pairs = [(x, trace if isinstance(trace := call.find(x), RunningSum) else None) for x in args]
        first = pairs[0][1] if pairs else None
        if core in RUNNING:
            self.start(call, first)
        elif len(args) == 1 and first is not None and core in (*COPIES, "neg", *EXPONENTIALS):
            if core in EXPONENTIALS and first.kind is SumKind.LOGS:
                self.log.put(y, first._replace(kind=SumKind.DECAYS))
            elif core == "neg" and first.kind is SumKind.LOGS:
                self.log.put(y, first._replace(sign=-first.sign))
            elif core in COPIES:
                self.log.put(y, first)
        elif first is not None and can_divide(first) and core in ADDS_DIMS and y.shape == (*args[0].shape, 1):
            self.log.put(y, first)
        elif first is not None and can_divide(first) and core in (*BOUNDS, "reciprocal"):
            sign = -first.sign if core == "reciprocal" else first.sign
            self.log.put(y, first._replace(kind=SumKind.DIVISORS, sign=sign))
        elif len(args) == 2 and not call.kwargs and core in (*PRODUCTS, *QUOTIENTS, "add", "sub", "subtract"):
            flip = -1 if core in (*QUOTIENTS, "sub", "subtract") else 1
            pairs = pairs[::-1] if call.is_reversed and flip < 0 else pairs
            if not self.divide(call, pairs, flip):
                self.join(call.frame, core in ("add", "sub", "subtract"), pairs, flip, y)

    def divide(self, call: FollowedFunction, pairs: Any, flip: int) -> bool:
        """Follow a number over running sums, these plus a number, or divided by those of weights; return whether y is one."""
        (x, first), (other, second) = pairs
        if second is not None and can_divide(second) and isinstance(x, int | float) and call.core in QUOTIENTS:
            self.log.put(call.y, second._replace(kind=SumKind.DIVISORS, sign=-second.sign))
            return True
        if call.core == "add" and isinstance(number := other if first is not None else x, int | float) and number:
            trace = first or second
            if trace is not None and can_divide(trace):
                self.log.put(call.y, trace._replace(kind=SumKind.DIVISORS))
            return trace is not None and can_divide(trace)
        if first is None or second is None or call.core not in (*PRODUCTS, *QUOTIENTS):
            return False
        orders = ((first, second, other),) if flip < 0 else ((first, second, other), (second, first, x))
        for total, divisor, by in orders:
            if can_divide(divisor) and divisor.sign == -flip:
                mean = find_mean(call.frame, total, divisor, by, call.y)
                self.means += [mean] if mean is not None else []
                return mean is not None
        return False

    def join(self, frame: ModuleFrame, is_log: bool, pairs: Any, flip: int, y: Tensor) -> None:
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
                self.add_scan(frame, y, ended, is_log, sign)
            elif ended is None and can_be_written(frame, other, y):
                self.log.put(y, trace._replace(kind=terms, sign=sign, written=other.detach()))
            return

    def add_scan(self, frame: ModuleFrame, y: Tensor, summed: RunningSum, is_log: bool, sign: int) -> None:
        """Keep y, or its exponentials, as the states of a scan."""
        decays, written = summed.decays, summed.written
        assert written is not None
        if sign < 0:
            decays = -decays if summed.is_log else decays.reciprocal()
        if is_log != summed.is_log:
            decays = decays.log() if is_log else decays.exp()
        function = "logcumsumexp" if is_log else "cumsum"
        self.scans.append(ChannelScan(frame, function, y.detach().clone(), decays, written, summed.axis, is_log))

    def take(self, frame: ModuleFrame) -> list[ChannelScan]:
        """Return the scans of a module that ends, and forget them."""
        ended = [one for one in self.scans if one.frame is frame]
        self.scans = [one for one in self.scans if one.frame is not frame]
        return ended

    def take_means(self, frame: ModuleFrame, outputs: set[int]) -> list[RunningMean]:
        """Return the running means of a module that ends, but for those that queries multiply to outputs, and forget all."""
        ended = [one for one in self.means if one.frame is frame]
        self.means[:] = [one for one in self.means if one.frame is not frame]
        return [one for one in ended if not one.is_multiplied(outputs)]


def can_divide(trace: RunningSum) -> bool:
    """Return whether running sums, or a number over them, may be what something is divided by: not their negatives."""
    return trace.kind is SumKind.DIVISORS or (trace.kind is SumKind.LOGS and trace.sign > 0)


def can_be_written(frame: ModuleFrame, x: Any, y: Tensor) -> bool:
    """Return whether x can be what tokens write, in their order, of which y was made."""
    return isinstance(x, Tensor) and x.shape == y.shape and not has_other_order(frame, x)
