"""The functions that make weights of scores, kept while an intervention is active, to run again with changed scores.

They are the model's own functions with its own arguments, so that weights which no formula gives are changed exactly too: heads
mixed by any layer, differences of softmaxes, activations of scores and what divides them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.observe.interception.function_roles import Role, infer_role, strip_affixes
from regard.observe.interception.handwritten.products.labelled_product import ADDING_PRODUCTS
from regard.observe.interception.handwritten.products.tensor_axes import AxisTable, Dims
from regard.observe.interception.handwritten.products.traces import Trace, TraceKind, Traces
from regard.observe.interception.handwritten.scores.axis_groups import Groups
from regard.observe.interception.plain_tensors import UnreadableError
from regard.observe.interception.provenance import is_in_place
from regard.observe.interception.tensor_arguments import find_tensors, list_entries

MAX_STEPS = 64  # functions from the scores to the product with the values; of more, the scores are no attention
UNKNOWN = "its weights cannot be computed again from its scores"
DIFFERENT = f"{UNKNOWN}: the functions between them give other numbers when they run again, as dropout does"
OTHER_KEYS = f"{UNKNOWN}, of which some are over other keys or queries"
SUMMED = f"{UNKNOWN}: they are divided by sums of what its activation makes, in which a hidden score is not 0"
NO_PRODUCT = f"{UNKNOWN} at another temperature: these are not known apart from what is added to them"


@dataclass(frozen=True, eq=False)
class Step:
    """A function that ran: its arguments, its results and the trace of each; what it was made of is in steps before."""

    run: Callable[..., Any]
    name: str
    args: Any
    kwargs: Any
    results: list[Tensor]
    traces: list[Trace | None]
    given: list[tuple[Tensor, Trace | None]]  # results of earlier steps among the arguments, with their traces
    starts: int  # one bit for each start that it depends on
    is_boundary: bool  # whether it turned scores into weights

    def find_trace(self, x: Tensor) -> Trace | None:
        """Return the trace of a result."""
        return next((trace for y, trace in zip(self.results, self.traces, strict=True) if y is x), None)

    @property
    def sums_entries(self) -> bool:
        """Whether it may sum over keys."""
        is_smaller = any(x.numel() > y.numel() for x, _ in self.given for y in self.results)
        return is_smaller or infer_role(self.name) is Role.SUM or "norm" in self.name.lower()

    @property
    def has_effects(self) -> bool:
        """Whether it may count what it is given, as a batch norm in training."""
        if isinstance(self.run, nn.Module):
            return self.run.training and next(self.run.buffers(), None) is not None
        return self.name in ("batch_norm", "instance_norm") and any(x is True for x in (*self.args, *self.kwargs.values()))

    def run_again(self, values: dict[int, Any], hider: "KeyHider | None", factor: float) -> list[Tensor]:
        """Run the function with other values of tensors, by their ids; return its results."""
        args, kwargs = (substitute(given, values) for given in (self.args, self.kwargs))
        if is_in_place(self.name):
            args = (args[0].clone(), *args[1:])
        if not self.given and factor != 1:
            if strip_affixes(self.name) != "softmax" or not args:
                raise UnreadableError(NO_PRODUCT)
            args = (args[0] * factor, *args[1:])
        hides = hider is not None and self.is_boundary
        result = hider.weigh(self, args, kwargs) if hider is not None and hides else self.run(*args, **kwargs)
        return list_tensors(args[0] if result is None else result)


class WeightSteps:
    """The functions of one forward from products of queries with keys to weights, in the order in which they ran."""

    def __init__(self) -> None:
        self.is_active = False
        self.steps: list[Step] = []
        self.last: dict[int, Step] = {}  # that made a tensor, by the tensor's id; the step keeps the tensor
        self.starts = 0

    def restart(self, is_active: bool) -> None:
        """Forget all functions when a forward starts."""
        self.is_active, self.starts = is_active, 0
        self.steps.clear()
        self.last.clear()

    def add(self, tracker: Traces, run: Callable[..., Any], name: str, args: Any, kwargs: Any, result: Any) -> None:
        """Add a function if it started scores or weights that are followed, or if its arguments depend on these."""
        given = [(x, self.last[id(x)]) for x in find_tensors(args, kwargs) if id(x) in self.last]
        results = list_tensors(result)
        traces = [tracker.find(x) for x in results]
        if not given and not any(one is not None and one.pairs and one.kind is not TraceKind.WEIGHTED for one in traces):
            return  # a router's scores, for one, are of no pairs of tokens
        starts = 0
        for _, step in given:
            starts |= step.starts
        if not given:
            self.starts += 1
            starts = 1 << self.starts
        writes = is_in_place(name) and all(x is not args[0] for x, _ in given)
        if writes or sum(bool(step.starts & starts) for step in self.steps) > MAX_STEPS:
            self.drop(starts)  # what was in the first argument before is not known
            return
        sources = [(x, step.find_trace(x)) for x, step in given]
        had_weights = any(one is not None and one.kind is TraceKind.WEIGHTS for _, one in sources)
        is_boundary = not had_weights and any(one is not None and one.kind is TraceKind.WEIGHTS for one in traces)
        made = Step(run, name, args, kwargs, results, traces, sources, starts, is_boundary)
        self.steps.append(made)
        self.last |= {id(x): made for x in results}

    def forget(self, weights: Tensor) -> None:
        """Forget the functions of weights that were multiplied with values, and all others that depend on the same scores."""
        if id(weights) in self.last:
            self.drop(self.last[id(weights)].starts)

    def drop(self, starts: int) -> None:
        """Forget all functions that depend on some starts."""
        self.steps = [step for step in self.steps if not step.starts & starts]
        self.last = {id(x): step for step in self.steps for x in step.results}

    def run_again(self, weights: Tensor, table: AxisTable, groups: Groups, visible: Tensor, factor: float) -> Tensor:
        """Return what weights would be if scores were multiplied by a factor and queries saw only the visible keys (q, k).

        Raises UnreadableError if that cannot be computed.
        """
        if id(weights) not in self.last:
            raise UnreadableError(UNKNOWN)
        starts = self.last[id(weights)].starts
        steps = [step for step in self.steps if step.starts & starts]
        if not all(has_one_layout(step, table, groups) for step in steps):
            raise UnreadableError(OTHER_KEYS)
        if any(step.has_effects for step in steps):
            raise UnreadableError(DIFFERENT)
        with torch.random.fork_rng([weights.device] if weights.is_cuda else []):
            with torch.no_grad():
                again = run_steps(steps, weights)
                tolerance = 64 * torch.finfo(weights.dtype).eps * weights.abs().nan_to_num(0, 0).amax()
                if not bool(((again - weights).abs() <= tolerance).logical_or(weights.isnan()).all()):
                    raise UnreadableError(DIFFERENT)
            return run_steps(steps, weights, KeyHider(table, groups, visible), factor)


class KeyHider:
    """How scores become weights where queries see only the visible keys (q, k)."""

    def __init__(self, table: AxisTable, groups: Groups, visible: Tensor) -> None:
        self.table, self.groups, self.visible = table, groups, visible

    def weigh(self, step: Step, args: Any, kwargs: Any) -> Tensor:
        """Run a step that makes weights of scores: hidden scores of a softmax are -inf, other hidden weights 0.

        A query that sees nothing has weights 0. Keys that the model itself hides by a finite minimum stay hidden.
        """
        y, trace = step.results[0], step.traces[0]
        if len(step.results) > 1 or trace is None or trace.dims is None:
            raise UnreadableError(UNKNOWN)
        hidden = self.arrange(~self.visible, trace.dims, y.shape)
        if not trace.extent:  # an activation of each score
            result: Tensor = step.run(*args, **kwargs)
            return result.masked_fill(hidden, 0)
        if trace.keys is None or {*self.table.expand_axes(trace.keys)} != {*self.groups.keys}:
            raise UnreadableError(OTHER_KEYS)
        axis = find_key_dim(trace.dims, self.table, self.groups)
        is_changed = hidden.any(axis, keepdim=True)
        core = strip_affixes(step.name)
        if core == "softmax" and args and args[0].shape == y.shape:
            masked = args[0].masked_fill(hidden | (is_changed & (args[0] < torch.finfo(args[0].dtype).min / 2)), -torch.inf)
            is_blind = is_changed & masked.isneginf().all(axis, keepdim=True)
            weights: Tensor = step.run(masked.masked_fill(is_blind, 0), *args[1:], **kwargs)
            return weights.masked_fill(is_blind, 0)
        if infer_role(core) is Role.SOFTMAX and core != "softmin":
            raise UnreadableError(UNKNOWN)
        left: Tensor = step.run(*args, **kwargs).masked_fill(hidden, 0)
        total = left.sum(axis, keepdim=True)
        return torch.where(is_changed, left / total.masked_fill(total == 0, 1), left)

    def arrange(self, x: Tensor, dims: Dims, shape: torch.Size) -> Tensor:
        """Return numbers of queries and keys (q, k) in the layout of a tensor with dimensions `dims`."""
        queries, keys = self.groups.queries, self.groups.keys
        own = [axis for axes in self.table.expand_dims(dims) for axis in axes]
        if not {*queries, *keys} <= {*own}:  # some were cut off later
            raise UnreadableError(OTHER_KEYS)
        others = tuple(axis for axis in own if axis not in {*queries, *keys})
        count = math.prod(self.table.get_sizes(others))
        return self.table.restore(x.expand(count, *x.shape), (others, queries, keys), dims, shape)


def find_key_dim(dims: Dims, table: AxisTable, groups: Groups) -> int:
    """Return the dimension of weights that holds the keys. Raises UnreadableError if it holds others too, or not all."""
    found = [n for n, axes in enumerate(table.expand_dims(dims)) if {*axes} & {*groups.keys}]
    if len(found) != 1 or {*table.expand_dims(dims)[found[0]]} != {*groups.keys}:
        raise UnreadableError(OTHER_KEYS)
    return found[0]


def has_one_layout(step: Step, table: AxisTable, groups: Groups) -> bool:
    """Return whether tensors that a step combines have no queries where others have keys, as weights plus their transpose."""
    found: dict[int, set[bool]] = {}
    for _, trace in step.given:
        dims = () if trace is None or trace.dims is None else table.expand_dims(trace.dims)
        for n, axes in enumerate(reversed(dims)):
            for kind, group in ((False, groups.queries), (True, groups.keys)):
                if {*axes} & {*group}:
                    found.setdefault(n, set()).add(kind)
    return all(len(kinds) == 1 for kinds in found.values())


def run_steps(steps: list[Step], weights: Tensor, hider: KeyHider | None = None, factor: float = 1.0) -> Tensor:
    """Run steps again, with their scores multiplied by a factor and some keys hidden; return the weights.

    The products that start scores stay as they are, so that gradients flow through them. Weights that no softmax has a part in,
    also scores that are weights themselves, as in retention, are 0 for hidden keys.
    """
    values: dict[int, Any] = {}
    hides: dict[int, bool] = {}  # whether keys are hidden in a result
    for step in steps:
        are_weights = {hides[id(x)] for x, _ in step.given}
        if len(are_weights) > 1 and infer_role(step.name) is not Role.MULTIPLY:
            raise UnreadableError(UNKNOWN)
        hides |= dict.fromkeys(map(id, step.results), step.is_boundary or True in are_weights)
        if step.given or step.is_boundary:
            results = step.run_again(values, hider, factor)
        elif factor != 1 and strip_affixes(step.name) in ADDING_PRODUCTS:
            raise UnreadableError(NO_PRODUCT)
        else:
            results = [x if factor == 1 else x * factor for x in step.results]
        values |= {id(x): y for x, y in zip(step.results, results, strict=True)}
    again: Tensor = values[id(weights)]
    has_softmax = any(step.is_boundary and any(one is not None and one.extent for one in step.traces) for step in steps)
    if hider is None or (has_softmax and hides[id(weights)]):
        return again
    trace = steps[-1].find_trace(weights)
    if trace is None or trace.dims is None:
        raise UnreadableError(UNKNOWN)
    hidden = hider.arrange(~hider.visible, trace.dims, again.shape)
    if bool(again.detach()[hidden].any()) and any(step.sums_entries for step in steps):
        raise UnreadableError(SUMMED)
    return again.masked_fill(hidden, 0)


def list_tensors(result: Any) -> list[Tensor]:
    """Return the tensors of a function's result."""
    return [x for x in ([result] if isinstance(result, Tensor) else list_entries(result)) if isinstance(x, Tensor)]


def substitute(given: Any, values: dict[int, Any]) -> Any:
    """Return arguments with some tensors, known by their ids, replaced by others."""
    if isinstance(given, Tensor):
        return values.get(id(given), given)
    if isinstance(given, dict):
        return {key: substitute(x, values) for key, x in given.items()}
    return type(given)(substitute(x, values) for x in given) if type(given) in (list, tuple) else given
