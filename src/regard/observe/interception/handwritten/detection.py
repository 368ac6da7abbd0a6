"""Detection of handwritten attention: softmax weights multiplied with values and summed, with no kernel to record.

Scores and weights are followed through every function. A product of weights with values is attention where the values are
tokens, neither parameters nor constants, and the scores are of pairs of tokens: a product, a distance or a network of two,
whatever turned them into weights. Other weights that a softmax made and a product sums, as of pooling, a router, a codebook or
places that each token predicts, are `other_weights`.
"""

import weakref
from functools import cache
from typing import Any

from torch import Tensor, nn

from regard.observe.interception.function_roles import BASES, POWERS, Role, infer_role, name_exponential, strip_affixes
from regard.observe.interception.handwritten.ancestors.ancestor_search import has_tokens, is_residual
from regard.observe.interception.handwritten.ancestors.token_pairs import find_pair, is_broadcast_pair
from regard.observe.interception.handwritten.handwritten_call import HandwrittenCall
from regard.observe.interception.handwritten.product_roles import sums_tokens
from regard.observe.interception.handwritten.product_tracker import ProductTracker
from regard.observe.interception.handwritten.products.traces import TraceKind, is_followable, join_roots, list_parts
from regard.observe.interception.handwritten.score_tracker import NO_PRODUCT
from regard.observe.interception.handwritten.scores.head_mixing import describe_mixing, has_projection, is_head_mixing
from regard.observe.interception.handwritten.scores.moved_entries import (
    fills_followed,
    follow_places,
    is_replayed,
    keep_places,
    settle_all,
)
from regard.observe.interception.handwritten.scores.trace_axes import follow_axes, keep_undropped
from regard.observe.interception.handwritten.weight_tracker import activate
from regard.observe.interception.provenance import JOINS, LIKE_ANOTHER, ModuleFrame
from regard.observe.interception.tensor_arguments import find_tensors, list_entries, list_objects

STARTS = (Role.SOFTMAX, Role.LOG_SOFTMAX, Role.PRODUCT, Role.DISTANCE, Role.SUM)
USES = (Role.PRODUCT, Role.MULTIPLY, Role.SUM)  # of weights, which UsedWeights follows
STRAIGHT = (nn.Dropout, nn.Identity)  # parameterless modules that do not turn scores into weights


class HandwrittenTracker(ProductTracker):
    """The scores, weights and weighted values of one forward, followed from operation to operation."""

    def may_follow_any(self, args: Any, kwargs: Any) -> bool:
        """Return False only if no tensor among the arguments is followed, nor used weights: quick, for the many functions."""
        traces, used = self.traces, self.used.traces
        if not (traces or used):
            return False
        ids = [*map(id, list_objects(args, kwargs))]
        return not (traces.keys().isdisjoint(ids) and used.keys().isdisjoint(ids))

    def follow_function(
        self, frames: list[ModuleFrame], func: Any, name: str, role: Role | None, args: Any, kwargs: Any, result: Any
    ) -> HandwrittenCall | None:
        """Follow a function; return the call of attention that it completes, or None."""
        if is_maximum_of_two(name, args, kwargs):
            name, role = "maximum", infer_role("maximum")
        if name in POWERS and len(args) == 2 and (power := name_exponential(name, args)):
            name, role, args = power, Role.NONLINEAR, tuple(x for x in args if isinstance(x, Tensor))
        call = self.follow_operation(frames, func, name, role, args, kwargs, result)
        results = list_followable(result)
        if call is None and results and (self.used.has_any or (self.traces and role in USES)):
            self.used.follow_function(self, frames, name, role, args, kwargs, results)
        return call

    def follow_operation(
        self, frames: list[ModuleFrame], func: Any, name: str, role: Role | None, args: Any, kwargs: Any, result: Any
    ) -> HandwrittenCall | None:
        """Follow a function among tensors that are not yet used; return the call of attention that it completes, or None."""
        tensors = [x for x in find_tensors(args, kwargs) if not x.is_nested]
        tensors = tensors[:1] if strip_affixes(name) in LIKE_ANOTHER else tensors
        results = list_followable(result)
        traced = self.mark_edits(name, tensors, results)
        if not results or not (traced or may_start(role, name)):
            return None
        moves = is_replayed(name) and not fills_followed(name, args, traced)
        traced = traced if moves else settle_all(self, traced)
        if role in (Role.PRODUCT, Role.DISTANCE):
            return self.follow_product(frames, role, name, args, kwargs, results[0])
        if role in (Role.SOFTMAX, Role.LOG_SOFTMAX):
            axis = kwargs.get("dim", args[1] if len(args) > 1 and type(args[1]) is int else -1)
            scores = next((weakref.ref(x) for x in tensors), None)
            self.follow_softmax(frames[-1], role, name, scores, axis, traced, results[0])
        elif not traced:
            self.follow_unknown(frames, role, name, tensors, results[0])
        else:
            others = [x for x in tensors if x.is_floating_point() and self.find(x) is None and has_tokens(frames[-1], x)]
            x, trace = max(traced, key=lambda one: (one[1].kind, one[1].form is not None))
            if len(traced) > 1:
                pairs = any(one.pairs for _, one in traced)
                size = results[0].numel() if name in JOINS else max(one.size for _, one in traced)
                has_edits = any(one.has_edits for _, one in traced)
                trace = trace._replace(pairs=pairs, roots=join_roots(traced), size=size, has_edits=has_edits)
            trace = follow_axes(self.table, trace, func, name, args, kwargs, x, traced, results)
            if trace.moved is not None and not moves:
                trace = trace._replace(moved=keep_places(trace, name, args, kwargs, x, results))
            if trace.kind is TraceKind.WEIGHTED:
                weighted = [v for v, one in traced if one.kind is TraceKind.WEIGHTED]
                adds = strip_affixes(name) == "addcmul" and x is args[0] and len(traced) > 1  # further products
                several, role = len(weighted) > 1 or adds, Role.ADD if adds else role
                return self.follow_sum(role, name, args, kwargs, x, trace, several, others, results)
            if role is Role.ADD and trace.kind is TraceKind.SCORES and any(is_residual(frames, v, x) for v in others):
                self.drop(results[0])  # features, which a layer adds to its input
            elif role is Role.MULTIPLY and self.follow_weighting(frames, name, tensors, x, trace, results[0]):
                return None
            else:
                self.follow_other(frames, role, name, args, kwargs, x, trace, others, results)
                if moves and (trace.dims is None or trace.moved is not None):
                    follow_places(self, func, name, args, kwargs, traced, results)
        return None

    def follow_unknown(self, frames: list[ModuleFrame], role: Role | None, name: str, tensors: list[Tensor], y: Tensor) -> None:
        """Follow the result y of a function of tensors that are not followed."""
        function = strip_affixes(name)
        if function in BASES and is_broadcast_pair(frames[-1], weakref.ref(tensors[0]), y.numel()):
            dims = self.table.add_dims(y.shape)
            self.start(y, TraceKind.WEIGHTS, pairs=True, function=function, dims=dims, changes=(NO_PRODUCT,))
        if tensors and y.numel() < tensors[0].numel():
            self.follow_features(frames, role, tensors[0], y)

    def follow_module(self, frames: list[ModuleFrame], child: nn.Module, x: Tensor, y: Any) -> None:
        """Follow a module that cannot attend: dropout, one that mixes heads, or a network that scores pairs."""
        if y is x or not is_followable(y) or not (self.traces or y.shape[-1:] == (1,)):
            return  # y is x for a module that hooks are put on
        if y.shape[-1:] == (1,) and y.shape[:-1] == x.shape[:-1] and x.shape != y.shape:
            pair = find_pair(frames[-1], x, x.shape[-1])
            if pair is not None:
                self.start_scores(frames, y, pair)
                return
        trace = next((one for _, one in settle_all(self, self.find_all([x]))), None)
        if trace is not None and trace.kind is TraceKind.WEIGHTED and next(child.parameters(), None) is not None:
            return  # weighted values that a layer transforms are not summed over the keys
        if trace is not None and is_head_mixing(x, y, list(child.parameters())):
            plain = isinstance(child, STRAIGHT) or next(child.parameters(), None) is not None
            if isinstance(child, nn.Dropout) and child.training and child.p and trace.kind is TraceKind.WEIGHTS:
                trace = keep_undropped(trace, x)
            elif not (isinstance(child, nn.Identity | nn.Dropout) and x.shape == y.shape):
                name = type(child).__name__
                activates = trace.kind is TraceKind.SCORES and not plain
                if activates and sums_tokens(self, frames, trace):
                    return
                trace = activate(trace, name) if activates else trace._replace(parts=list_parts(trace))
                trace = trace._replace(
                    dims=trace.dims if x.shape == y.shape else None,
                    form=None,
                    relative=None,
                    unmixed=trace.unmixed or trace.form,
                    moved=None,
                    changes=(*trace.changes, describe_mixing(name, x, y) if has_projection(child) else name),
                )
            if trace.kind is TraceKind.SCORES and trace.pairs and not plain:
                trace = trace._replace(kind=TraceKind.WEIGHTS, function=type(child).__name__, size=y.numel())
            self.follow(y, trace)


@cache
def may_start(role: Role | None, name: str) -> bool:
    """Return whether a function may make scores or weights of tensors that are not followed. Cached per name."""
    return role in STARTS or strip_affixes(name) in BASES


def list_followable(result: Any) -> list[Tensor]:
    """Return the tensors that can be followed among a function's result."""
    return [y for y in ([result] if isinstance(result, Tensor) else list_entries(result)) if is_followable(y)]


def is_maximum_of_two(name: str, args: Any, kwargs: Any) -> bool:
    """Return whether a function is torch.max of two tensors, which is torch.maximum."""
    return name == "max" and isinstance(args[1] if len(args) > 1 else kwargs.get("other"), Tensor)
