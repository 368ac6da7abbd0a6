"""Detection of handwritten attention: softmax weights multiplied with values and summed, with no kernel to record.

Scores and weights are followed through every function. A product of weights with values is attention where the values are
tokens, neither parameters nor constants, and either
- the scores are of pairs of tokens: a product, a distance or a network of two, whatever turned them into weights; or
- they are a softmax of anything, and several rows of weights share the values, which the scores did not choose; rows within
  each token, as of the streams of hyper-connections, do not count.
A router, a gate, a classifier and a pooling layer are neither.
"""

import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from regard.observe.interception.function_roles import Role, guards_norm, infer_role, is_nonlinear, strip_affixes
from regard.observe.interception.handwritten.added_scores import SUM, count_functions_of_sum, gates_entries
from regard.observe.interception.handwritten.ancestor_search import (
    Pair,
    TensorRef,
    find_ancestors,
    find_pair,
    has_tokens,
    is_broadcast_pair,
    is_residual,
    multiplies_copies,
)
from regard.observe.interception.handwritten.attention_free import TableProducts
from regard.observe.interception.handwritten.contraction import find_operands
from regard.observe.interception.handwritten.divided_exponentials import (
    EXPONENTIALS,
    Softmax,
    find_divided_exponentials,
    find_exponential,
    may_divide_by_sums,
)
from regard.observe.interception.handwritten.edge_call import find_edge_sum, is_edge_softmax, read_index_put
from regard.observe.interception.handwritten.edge_softmax import (
    EDGE_SUMS,
    EdgeExponentials,
    is_one_hot,
    scores_neighbors,
    skip_layouts,
)
from regard.observe.interception.handwritten.entry_products import EntryProducts, Factors
from regard.observe.interception.handwritten.entry_sources import add_sink, drop_repeats, restore_keys
from regard.observe.interception.handwritten.handwritten_call import HandwrittenCall
from regard.observe.interception.handwritten.labelled_product import (
    LabelledProduct,
    Labels,
    label_entries,
    label_product,
    label_sum,
    separate_entry_factors,
    separate_factors,
)
from regard.observe.interception.handwritten.linear_attention import (
    ChainRoles,
)
from regard.observe.interception.handwritten.linear_contexts import LinearContexts
from regard.observe.interception.handwritten.linear_scores import (
    CHAINED,
    CHUNKS,
    are_of_all_tokens,
    find_roles_of_scores,
    weigh_linearly,
)
from regard.observe.interception.handwritten.moved_entries import (
    fills_followed,
    follow_places,
    is_replayed,
    keep_places,
    settle_all,
)
from regard.observe.interception.handwritten.pair_loops import (
    GATES,
    divides_by_loop,
    find_gate,
    joins_scores_of_pairs,
    may_join_scores,
)
from regard.observe.interception.handwritten.product_roles import (
    is_attention_product,
    is_factor,
    is_product_of_masked_scores,
    is_score_matrix,
    is_sum_of_heads,
    is_sum_of_scores,
    is_value,
    list_softmax_axes,
    makes_features,
    multiplies_features,
    shares_values,
    sums_tokens,
)
from regard.observe.interception.handwritten.row_edits import may_edit_scores, may_edit_weights
from regard.observe.interception.handwritten.score_form import (
    CHOOSES_BY_VALUE,
    COPIES,
    PERMUTES,
    QUOTIENTS,
    SAME,
    VIEWS,
    StepKind,
    extend_form,
    follow_dims,
    is_inactive_dropout,
    is_view_index,
    start_form,
)
from regard.observe.interception.handwritten.second_products import UsedWeights
from regard.observe.interception.handwritten.tensor_axes import Dims
from regard.observe.interception.handwritten.traces import (
    ActivatedScores,
    PickedKeys,
    Trace,
    Traced,
    TraceKind,
    Traces,
    is_followable,
    join_roots,
    list_parts,
)
from regard.observe.interception.provenance import (
    FRESH,
    JOINS,
    LIKE_ANOTHER,
    ModuleFrame,
    find_tensors,
    has_separate_sources,
    is_in_place,
    list_entries,
    list_objects,
)

STARTS = (Role.SOFTMAX, Role.LOG_SOFTMAX, Role.PRODUCT, Role.DISTANCE, Role.SUM, Role.ONE_HOT)
USES = (Role.PRODUCT, Role.MULTIPLY, Role.SUM)  # of weights, which UsedWeights follows
STRAIGHT = (nn.Dropout, nn.Identity)  # parameterless modules that do not turn scores into weights
NO_PRODUCT = "another function than a product"
LAYOUT_OR_SAME = VIEWS | PERMUTES | SAME | {"getitem"}
INHERITED = (  # by weights, from scores
    *("dims", "form", "unmixed", "changes", "eps", "moved", "has_edits", "picked", "has_separate_sources"),
)
DECOMPOSES = {  # whose results are no scores: those of a covariance are vectors of channels
    *("linalg_eigh", "linalg_eig", "linalg_svd", "svd", "linalg_qr", "qr"),
    *("linalg_eigvalsh", "linalg_eigvals", "linalg_svdvals"),
}
MAX_MIXING_ENTRIES = 4096  # entries of a matrix that mixes heads: at most 64 x 64


class HandwrittenTracker(Traces):
    """The scores, weights and weighted values of one forward, followed from operation to operation."""

    def __init__(self) -> None:
        super().__init__()
        self.used = UsedWeights()
        self.edges = EdgeExponentials()
        self.entry_products = EntryProducts()
        self.linear = LinearContexts()
        self.tables = TableProducts()
        self.has_one_hot = False  # whether F.one_hot has run
        self.has_exponentials = False  # whether an exponential has run

    def clear(self) -> None:
        """Forget all followed tensors."""
        super().clear()
        self.used.clear()
        self.edges.weighted.clear()
        self.entry_products.clear()
        self.linear.clear()
        self.tables.clear()
        self.has_one_hot = False
        self.has_exponentials = False

    def may_follow_any(self, args: Any, kwargs: Any) -> bool:
        """Return False only if no tensor among the arguments is followed, nor used weights: quick, for the many functions."""
        traces, used = self.traces, self.used.traces
        if not (traces or used):
            return False
        ids = [*map(id, list_objects(args, kwargs))]
        return not (traces.keys().isdisjoint(ids) and used.keys().isdisjoint(ids))

    def may_start(self, role: Role | None, name: str, args: Any, y: Any) -> bool:
        """Return False only if no followed tensor may start with the result y of a function of others: quick, too."""
        if role is Role.MULTIPLY:
            return self.entry_products.can_add(args, y) or (self.has_exponentials and may_divide_by_sums(name, args))
        is_gate = role is Role.NONLINEAR and strip_affixes(name) in GATES
        return is_gate or role in STARTS or may_join_scores(name, args)

    def follow_function(
        self, frames: list[ModuleFrame], func: Any, name: str, role: Role | None, args: Any, kwargs: Any, result: Any
    ) -> HandwrittenCall | None:
        """Follow a function; return the call of attention that it completes, or None."""
        if is_maximum_of_two(name, args, kwargs):
            name, role = "maximum", infer_role("maximum")
        if strip_affixes(name) == "index_put":
            is_sum, added = read_index_put(args, kwargs)
            role = Role.SUM if is_sum else None
            name, args, kwargs = (name, args, kwargs) if added is None else ("index_add", added, {})
        factors = separate_entry_factors(args) if name == "einsum" and self.may_follow_any(args, kwargs) else None
        if factors is not None:
            func, name, role = torch.mul, "mul", Role.MULTIPLY
            args = factors[0], self.follow_layout(frames, *factors[1:])
        call = self.follow_operation(frames, func, name, role, args, kwargs, result)
        if call is None and (self.used.has_any or (self.traces and role in USES)):
            self.used.follow_function(self, frames, name, role, args, kwargs, list_followable(result))
        return call

    def follow_layout(self, frames: list[ModuleFrame], x: Tensor, order: list[int], shape: list[int]) -> Tensor:
        """Return a tensor with its dimensions in an order and of a shape, followed if the tensor is."""
        permuted = x.permute(order)
        self.follow_operation(frames, Tensor.permute, "permute", None, (x, order), {}, permuted)
        y = permuted.reshape(shape)
        self.follow_operation(frames, Tensor.reshape, "reshape", None, (permuted, shape), {}, y)
        return y

    def follow_operation(
        self, frames: list[ModuleFrame], func: Any, name: str, role: Role | None, args: Any, kwargs: Any, result: Any
    ) -> HandwrittenCall | None:
        """Follow a function among tensors that are not yet used; return the call of attention that it completes, or None."""
        tensors = [x for x in find_tensors(args, kwargs) if not x.is_nested]
        tensors = tensors[:1] if strip_affixes(name) in LIKE_ANOTHER else tensors
        results = list_followable(result)
        traced = self.mark_edits(name, tensors, results)
        if results and not traced and may_join_scores(name, args):
            if joins_scores_of_pairs(frames[-1], args[0]):
                function = find_gate(frames[-1], args[0][0])
                if function:
                    self.start_weights(results[0], function)
                else:
                    self.start_scores(frames, results[0], None)
            return None
        is_gate = role is Role.NONLINEAR and strip_affixes(name) in GATES
        self.has_exponentials |= is_gate and strip_affixes(name) in EXPONENTIALS
        if not results or not (traced or role in STARTS or role is Role.MULTIPLY or is_gate):
            if role is Role.ONE_HOT:
                self.has_one_hot = True
            return None
        moves = is_replayed(name) and not fills_followed(name, args, traced)
        traced = traced if moves else settle_all(self, traced)
        if role is Role.SUM and tensors and self.entry_products.find(tensors[0]):
            if self.follow_summed_product(frames, name, args, kwargs, tensors[0], results[0]):
                return None
            traced = self.find_all(tensors)
        if role in (Role.PRODUCT, Role.DISTANCE):
            return self.follow_product(frames, role, name, args, kwargs, results[0])
        if role in (Role.SOFTMAX, Role.LOG_SOFTMAX):
            axis = kwargs.get("dim", args[1] if len(args) > 1 and type(args[1]) is int else -1)
            scores = next((weakref.ref(x) for x in tensors), None)
            self.follow_softmax(frames[-1], role, name, scores, axis, traced, results[0])
        elif (softmax := self.find_softmax(frames[-1], name, args, traced, results[0])) is not None:
            self.follow_softmax(frames[-1], Role.SOFTMAX, "softmax", *softmax, [], results[0])
        elif not traced:
            return self.follow_unknown(frames, role, name, args, kwargs, tensors, results[0])
        else:
            others = [x for x in tensors if x.is_floating_point() and self.find(x) is None and has_tokens(frames[-1], x)]
            x, trace = max(traced, key=lambda one: (one[1].kind, one[1].form is not None))
            if len(traced) > 1:
                pairs = any(one.pairs for _, one in traced)
                size = results[0].numel() if name in JOINS else max(one.size for _, one in traced)
                has_edits = any(one.has_edits for _, one in traced)
                trace = trace._replace(pairs=pairs, roots=join_roots(traced), size=size, has_edits=has_edits)
            may_be_read = trace.form is not None and (trace.form.has_running_sum or (others and trace.kind is TraceKind.SCORES))
            if role is Role.MULTIPLY and (may_be_read or trace.has_copied_keys):
                self.entry_products.add(name, args, traced, results[0])
            trace = self.follow_axes(trace, func, name, args, kwargs, x, traced, results)
            if trace.moved is not None and not moves:
                trace = trace._replace(moved=keep_places(trace, name, args, kwargs, x, results))
            if trace.kind is TraceKind.WEIGHTED:
                several = sum(one.kind is TraceKind.WEIGHTED for _, one in traced) > 1
                return self.follow_sum(role, name, args, kwargs, x, trace, several, others, results)
            if role is Role.ADD and trace.kind is TraceKind.SCORES and any(is_residual(frames, v, x) for v in others):
                self.drop(results[0])  # features, which a layer adds to its input
            elif not (role is Role.MULTIPLY and self.follow_weighting(frames, name, tensors, x, trace, results[0])):
                self.follow_other(frames, role, name, args, kwargs, x, trace, others, results)
                if strip_affixes(name) in CHOOSES_BY_VALUE:
                    self.follow_choice(x, result, kwargs.get("dim", find_dim(name, args)))
                if moves and (trace.dims is None or trace.moved is not None):
                    follow_places(self, func, name, args, kwargs, traced, results)
        return None

    def follow_unknown(
        self, frames: list[ModuleFrame], role: Role | None, name: str, args: Any, kwargs: Any, tensors: list[Tensor], y: Tensor
    ) -> HandwrittenCall | None:
        """Follow the result y of a function of tensors that are not followed; return the call that it completes, or None."""
        core = strip_affixes(name)
        if role is Role.NONLINEAR:
            count = count_functions_of_sum(frames[-1], args[0])
            if count is not None:
                self.start_weights(y, core, SUM, is_by_channel=count == 0 and y.dim() > 3)
        elif role is Role.MULTIPLY:
            if self.has_exponentials and core in QUOTIENTS and len(tensors) == 2:
                call = self.follow_quotient(frames[-1], core, tensors[0], tensors[1], y)
                if call is not None:
                    return call
            self.entry_products.add(name, args, [], y)
        elif core in EDGE_SUMS:
            return self.follow_edges(frames[-1], name, args, kwargs, tensors)
        if tensors and y.numel() < tensors[0].numel():
            self.follow_features(frames, tensors[0], y)
        elif tensors and core == "cumsum":
            self.follow_copies(frames[-1], tensors[0], y, name)
        return None

    def follow_quotient(self, frame: ModuleFrame, core: str, x: Tensor, by: Tensor, y: Tensor) -> HandwrittenCall | None:
        """Follow the quotient y of sums of exponentials, times values or not; return the call that it completes, or None."""
        quotient = self.tables.find_quotient(frame, x, by)
        if quotient is None and not divides_by_loop(frame, x, by):
            return None
        self.start_weights(y)
        if quotient is None and find_exponential(frame, weakref.ref(x)) is not None:
            return None  # a weight, which the loop multiplies with a value
        trace = self.traces.pop(id(y))
        return HandwrittenCall(f"exp and {core}", trace, y, None, 0, quotient=quotient)

    def start_weights(self, y: Tensor, function: str = "exp", made: str = NO_PRODUCT, is_by_channel: bool = False) -> None:
        """Start following what a function made of scores of pairs that are no product, for each channel or not."""
        dims = self.table.add_dims(y.shape)
        known: dict[str, Any] = {"function": function, "is_by_channel": is_by_channel, "dims": dims, "changes": (made,)}
        self.start(y, TraceKind.WEIGHTS, pairs=True, **known)

    def find_softmax(self, frame: ModuleFrame, name: str, args: Any, traced: list[Traced], y: Tensor) -> Softmax | None:
        """Return the scores of which a function makes the softmax y, and its axis; None if it is no softmax or is followed."""
        return None if any(x.shape == y.shape for x, _ in traced) else find_divided_exponentials(frame, name, args)

    def follow_module(self, frames: list[ModuleFrame], child: nn.Module, x: Tensor, y: Any) -> None:
        """Follow a module that cannot attend: dropout, one that mixes heads, or a network that scores pairs."""
        if y is x or not isinstance(y, Tensor) or not (self.traces or y.shape[-1:] == (1,)) or not is_followable(y):
            return  # y is x for a module that hooks are put on
        if y.shape[-1:] == (1,) and y.shape[:-1] == x.shape[:-1]:
            pair = find_pair(frames[-1], x, over_last=True)
            if pair is not None or x.dim() > 3:
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
                    unmixed=trace.unmixed or trace.form,
                    moved=None,
                    changes=(*trace.changes, describe_mixing(name, x, y) if has_projection(child) else name),
                )
            if trace.kind is TraceKind.SCORES and trace.pairs and not plain:
                trace = trace._replace(kind=TraceKind.WEIGHTS, function=type(child).__name__, size=y.numel())
            self.follow(y, trace)

    def follow_choice(self, x: Tensor, result: Any, dim: Any) -> None:
        """Follow the scores x that a function put in an order of their values along a dimension, with the keys of each."""
        before = self.find(x)
        if before is None or before.form is None or before.dims is None or not isinstance(result, tuple) or len(result) != 2:
            return
        y, index = result
        after, axis = self.find(y), dim % x.dim() if type(dim) is int else 0
        if after is None or before.kind is not TraceKind.SCORES or type(dim) is not int or x.dim() != y.dim():
            return
        places = self.table.add_axis(y.shape[axis])
        dims = tuple(places if n == axis else axes for n, axes in enumerate(before.dims))
        self.put(y, after._replace(dims=dims, picked=PickedKeys(before.form, index, dims, before.dims[axis], places)))

    def follow_softmax(
        self,
        frame: ModuleFrame,
        role: Role,
        name: str,
        x: TensorRef | None,
        axis: Any,
        traced: list[Traced],
        y: Tensor,
    ) -> None:
        """Follow the result y of a softmax or log-softmax of x over an axis."""
        extent = y.shape[axis] if type(axis) is int and -y.dim() <= axis < y.dim() else 0
        scores = [one for one in traced if one[1].pairs]
        kind = TraceKind.SCORES if role is Role.LOG_SOFTMAX else TraceKind.WEIGHTS
        if scores or extent != 1:
            properties: dict[str, Any] = {"dims": self.table.add_dims(y.shape)}
            if len(scores) == 1:
                properties = {one: getattr(scores[0][1], one) for one in INHERITED}
                properties["moved"] = add_sink(self.table, scores[0][0], properties["moved"], axis)
                if "softmin" in name and properties["form"] is not None:
                    properties["form"] = properties["form"].add_step(StepKind.MULTIPLY, -1.0)
            dims = properties["dims"]
            if kind is TraceKind.WEIGHTS and dims is not None and type(axis) is int and extent:
                properties["keys"] = dims[axis]
            pairs, is_by_channel, function = bool(scores), False, strip_affixes(name)
            if not traced and x is not None and extent > 1:
                is_by_channel = scores_channels(frame, x, y.shape, axis)
                is_outer = y.dim() == 2 and is_broadcast_pair(frame, x, y.numel())  # a number for each token
                pairs = pairs or is_by_channel or is_outer or scores_neighbors(frame, x, y.shape, axis)
            self.start(
                y, kind, pairs, join_roots(scores), extent=extent, function=function, is_by_channel=is_by_channel, **properties
            )

    def follow_product(
        self, frames: list[ModuleFrame], role: Role, name: str, args: Any, kwargs: Any, y: Tensor
    ) -> HandwrittenCall | None:
        """Follow a product that sums over an axis, or a distance; return the call of attention that it completes, or None."""
        operands = find_operands(name, args, kwargs)
        traced = self.find_all(operands)
        product = label_product(name, operands, args, kwargs)
        are_feature_maps = product is not None and multiplies_features(self, frames, product, traced)
        for x, trace in traced if role is Role.PRODUCT else ():
            others = [v for v in operands if v is not x]
            values = trace.kind is TraceKind.WEIGHTS and any(is_value(self, frames[-1], v, trace) for v in others)
            values = values and not (is_sum_of_scores(self, trace, x, product) or is_sum_of_heads(self, trace, x, product))
            values = values and not (are_feature_maps or is_factor(name, args, operands, x))
            if values and (trace.pairs or is_attention_product(self, frames, name, args, operands, x, trace, product)):
                if not trace.pairs and self.start_linear_call(frames, name, args, kwargs, others, y):
                    return None
                return self.complete_call(trace, x, product, name)
            learned = any(isinstance(v, nn.Parameter) for v in others)
            if trace.kind is TraceKind.WEIGHTED and (trace.pairs or trace.shared) and not learned:
                return self.complete_call(trace, x, None, "mul", name)  # with ones
            undecided = trace.kind is TraceKind.SCORES and trace.pairs
            undecided = undecided and not any(is_score_matrix(self, frames[-1], v) for v in others)
            if undecided and any(is_value(self, frames[-1], v, trace) for v in others):
                if is_product_of_masked_scores(self, frames[-1], trace):
                    self.linear.miss_call(frames, name, CHAINED, y)
                    self.drop(y)
                    return None
                product_of_scores, factors = separate_factors(name, args, kwargs, x)
                if self.linear.start_call(frames, self.table, name, product_of_scores, factors, x, trace, y):
                    self.drop(y)
                    return None
                roles = find_roles_of_scores(frames, self.table, trace, x, product_of_scores, partial(list_softmax_axes, self))
                if roles is not None and product_of_scores is not None:
                    return self.follow_linear_scores(frames, name, product_of_scores, factors, roles, x, trace, y)
                frames[-1].multiplies_scores = True  # linear attention in the other order, or other algebra
        self.drop(y)
        if self.has_exponentials and not traced and product is not None and self.tables.add(frames[-1], product, y):
            return None
        token_operands = [x for x in operands if has_tokens(frames[-1], x)]
        if self.has_one_hot and sum(is_one_hot(frames[-1], weakref.ref(x)) for x in token_operands) == 1 < len(token_operands):
            call = self.follow_edges(frames[-1], name, args, kwargs, token_operands)
            if call is not None or not is_square_of_one_hot(frames[-1], token_operands, y):
                return call
        if len(token_operands) > 1:
            if role is Role.PRODUCT and product is not None and makes_features(frames, product):
                return None
            is_outer = operands[0].shape[-1:] == (1,) and not (product is not None and product.sums_several())
            if role is Role.DISTANCE or not is_outer:
                weights = len(traced) == len(operands) and all(trace.kind is TraceKind.WEIGHTS for _, trace in traced)
                if weights and not are_feature_maps:
                    dims, function = self.table.add_dims(y.shape), traced[0][1].function
                    self.start(y, TraceKind.WEIGHTS, pairs=True, roots=join_roots(traced), function=function, dims=dims)
                else:
                    pair = token_operands[0], token_operands[1]
                    self.start_scores(frames, y, pair, product, roots=join_roots(traced) if are_feature_maps else 0)
            elif product is not None and product.added is None:
                self.entry_products.put(y, product)  # k @ vᵀ of one token
        elif traced:
            x, trace = traced[0]
            if trace.kind is not TraceKind.WEIGHTED and is_head_mixing(x, y, [v for v in operands if v is not x]):
                self.follow(y, self.mix_heads(trace, x, y, product, name))
        elif token_operands and y.numel() < token_operands[0].numel():
            self.follow_features(frames, token_operands[0], y)
        return None

    def follow_linear_scores(
        self,
        frames: list[ModuleFrame],
        name: str,
        product: LabelledProduct,
        factors: list[tuple[Tensor, Labels]],
        roles: ChainRoles,
        x: Tensor,
        trace: Trace,
        y: Tensor,
    ) -> HandwrittenCall | None:
        """Follow the product y of scores x with values as linear attention; return a call with stored weights if need be."""
        if not are_of_all_tokens(frames[-1], self.table, roles):
            self.linear.miss_call(frames, name, CHUNKS, y)
        elif not self.linear.start_call_of_scores(frames, self.table, name, product, factors, roles, trace, y):
            return self.complete_call(weigh_linearly(trace), x, product, name)
        self.drop(y)
        return None

    def start_linear_call(
        self, frames: list[ModuleFrame], name: str, args: Any, kwargs: Any, operands: list[Tensor], y: Tensor
    ) -> bool:
        """Start linear attention if one of the operands that a softmax is multiplied with to y is products of keys with values.

        The softmax is then a feature map of the queries. Return whether it is one.
        """
        for x, trace in self.find_all(operands):
            if trace.kind is TraceKind.SCORES and trace.pairs:
                product, factors = separate_factors(name, args, kwargs, x)
                if self.linear.start_call(frames, self.table, name, product, factors, x, trace, y, has_softmax=True):
                    self.drop(y)
                    return True
        return False

    def follow_features(self, frames: list[ModuleFrame], x: Tensor, y: Tensor) -> None:
        """Follow y as scores if it is x, features of pairs of tokens, summed over the features."""
        over_last = y.shape == x.shape[:-1] or y.shape == (*x.shape[:-1], 1)
        pair = find_pair(frames[-1], x, over_last)
        if pair is not None:
            self.start_scores(frames, y, pair)
        elif y.shape[-2:] == x.shape[-2:]:
            self.follow_copies(frames[-1], x, y)

    def follow_copies(self, frame: ModuleFrame, x: Tensor, y: Tensor, *names: str) -> None:
        """Follow y, a sum of entries x over tokens, as scores without a formula if one factor of x was repeated before."""
        if x.dim() > 2 and multiplies_copies(frame, x):
            self.start(y, TraceKind.SCORES, pairs=True, dims=self.table.add_dims(y.shape), changes=names, has_copied_keys=True)

    def follow_summed_product(self, frames: list[ModuleFrame], name: str, args: Any, kwargs: Any, x: Tensor, y: Tensor) -> bool:
        """Follow y, the sum of entries x that are products of two tensors; return whether that is all there is to follow.

        Those of keys with values are summed over tokens, and those of queries with such sums over features. A running sum keeps
        all axes of x, which is followed itself.
        """
        for product, traced, factors in self.entry_products.find(x):
            is_running = strip_affixes(name) == "cumsum" and not traced
            summed = product if is_running else label_sum(product, name, args, kwargs)
            if summed is None or not all(set(labels) <= set(summed.result) for _, labels in factors):
                continue
            if traced:
                operand, trace = traced[0]
                if self.linear.start_call(frames, self.table, "mul and sum", summed, factors, operand, trace, y):
                    return True
            elif all(has_tokens(frames[-1], one) for one in product.operands):
                self.start_scores(frames, x if is_running else y, product.operands, summed, factors)
                return not is_running
        return False

    def follow_edges(
        self, frame: ModuleFrame, name: str, args: Any, kwargs: Any, tensors: list[Tensor]
    ) -> HandwrittenCall | None:
        """Follow the exponentials that an index sums, as weights of edges; return the call if values were summed before."""
        e = self.edges.find(frame, tensors, partial(is_edge_softmax, name, args, kwargs))
        if e is None:
            return None
        dims = self.table.add_dims(e.shape)
        self.start(e, TraceKind.WEIGHTS, pairs=True, function="exp", is_by_channel=True, dims=dims)
        return self.complete_call(self.traces[id(e)], e, None, "mul", name) if e in self.edges.weighted else None

    def start_scores(
        self,
        frames: list[ModuleFrame],
        y: Tensor,
        pair: Pair | None,
        product: LabelledProduct | None = None,
        factors: Factors | None = None,
        roots: int = 0,
    ) -> None:
        """Start following scores of a pair of tensors, with their formula if they are a product of the two, and of factors."""
        form = None if product is None else start_form(self.table, product)
        if form is not None and len(form.dims) != y.dim():
            form = None
        if form is not None and product is not None:
            axes = dict(zip(product.result, form.dims, strict=True))
            for factor, labels in factors or []:
                form = form.add_step(StepKind.MULTIPLY, factor, tuple(axes[label] for label in labels))
        dims = self.table.add_dims(y.shape) if form is None else form.dims
        properties: dict[str, Any] = {"dims": dims, "form": form, "changes": () if form is not None else (NO_PRODUCT,)}
        sources = None if pair is None else has_separate_sources(frames, *pair)
        self.start(y, TraceKind.SCORES, pairs=True, roots=roots, has_separate_sources=sources, **properties)

    def mix_heads(self, trace: Trace, x: Tensor, y: Tensor, product: LabelledProduct | None, name: str) -> Trace:
        """Return the trace of scores or weights whose heads a small matrix mixed."""
        dims = trace.dims if x.shape == y.shape else None
        if product is not None and trace.dims is not None:
            place = product.find_place(x)
            dims = product.build_dims(self.table, {place: trace.dims})[2]
        return trace._replace(
            dims=dims,
            form=None,
            unmixed=trace.unmixed or trace.form,
            moved=None,
            undropped=None,
            parts=list_parts(trace),
            changes=(*trace.changes, describe_mixing(strip_affixes(name), x, y)),
        )

    def add_weights(self, trace: Trace, name: str, dims: Dims, others: list[Trace]) -> Trace:
        """Return the trace of the sum or difference of several weights, made of the softmaxes of all of them."""
        parts = list_parts(trace)
        for one in others:
            is_same = one.dims is not None and len(one.dims) == len(dims) and self.table.identify(dims, one.dims)
            parts = (*parts, *list_parts(one)) if parts and is_same and list_parts(one) else ()
        changes = (*trace.changes, strip_affixes(name))
        return trace._replace(dims=dims, form=None, moved=None, undropped=None, parts=parts, changes=changes)

    def follow_axes(
        self, trace: Trace, func: Any, name: str, args: Any, kwargs: Any, x: Tensor, traced: list[Traced], results: list[Tensor]
    ) -> Trace:
        """Return the trace of a function's result with its axes, and with its formula if these are scores."""
        y, changes = results[0], (*trace.changes, strip_affixes(name))
        dims = None
        if trace.dims is not None and len(results) == 1:
            dims = follow_dims(self.table, trace.dims, name, func, args, kwargs, x, y)
        if dims is None:
            return trace._replace(dims=None, form=None, undropped=None, changes=changes)
        if trace.kind is TraceKind.SCORES or trace.function == "tanh":  # bounded scores, not yet weights
            form, others = trace.form, [one for one in traced if one[0] is not x]
            if form is not None:
                other = others[0][1].form if others else None
                form = extend_form(self.table, form, name, args, kwargs, x, dims, other)
            has_edits = trace.has_edits or may_edit_scores(name, args, kwargs, x, y)
            changes = trace.changes if form is not None else changes
            return trace._replace(dims=dims, form=form, changes=changes, has_edits=has_edits)
        added_weights = [one for v, one in traced if v is not x and one.kind is TraceKind.WEIGHTS]
        if added_weights and infer_role(name) is Role.ADD:
            return self.add_weights(trace, name, dims, added_weights)
        if infer_role(name) is Role.CONVOLUTION:
            is_pointwise = len(args) > 1 and args[1].shape[2:].numel() == 1
            changes = (*trace.changes, describe_mixing(name, x, y) if is_pointwise else name)
            return trace._replace(dims=dims, form=None, moved=None, undropped=None, parts=list_parts(trace), changes=changes)
        if strip_affixes(name) == "dropout":
            trace = trace._replace(dims=dims)
            return trace if is_inactive_dropout("dropout", args, kwargs) else keep_undropped(trace, x)
        undropped = trace.undropped
        if undropped is not None and undropped[1] is not None:
            before = undropped[0].clone() if is_in_place(name) else undropped[0]
            again = follow_dims(self.table, undropped[1], name, func, (before, *args[1:]), kwargs, before, y)
            undropped = None if again is None else (func(before, *args[1:], **kwargs).detach(), again)
        is_same = strip_affixes(name) in LAYOUT_OR_SAME or name in LAYOUT_OR_SAME
        has_edits = trace.has_edits or may_edit_weights(name, args, trace, x, y)
        if is_same and undropped is trace.undropped and dims == trace.dims and has_edits == trace.has_edits:
            return trace
        changes = trace.changes if is_same else changes
        return trace._replace(dims=dims, undropped=undropped, changes=changes, has_edits=has_edits)

    def follow_weighting(
        self, frames: list[ModuleFrame], name: str, tensors: list[Tensor], x: Tensor, trace: Trace, y: Tensor
    ) -> bool:
        """Follow the entrywise product of weights x with values; return whether there are any values."""
        if trace.kind is not TraceKind.WEIGHTS or strip_affixes(name) not in ("mul", "multiply", "addcmul"):
            return False
        if any(gates_entries(frames[-1], trace, x, v) for v in tensors if v is not x):
            self.drop(y)
            return True
        if y.numel() <= trace.size and not trace.is_by_channel:
            return False  # a factor without an axis beyond those of the weights is a mask
        values = [v for v in tensors if v is not x and is_value(self, frames[-1], v, trace)]
        if y.numel() <= trace.size:  # one over the sums of exponentials, for each edge
            values = [v for v in values if id(weakref.ref(x)) not in find_ancestors(frames[-1:], v)]
        shared = not trace.pairs and any(shares_values(frames, x, v, trace.extent) for v in values)
        if values:
            is_broadcast = y.numel() > min(trace.size, values[0].numel())
            factors = (x, values[0]) if len(tensors) == 2 and is_broadcast else None  # else they may be a mask too
            self.follow(y, trace._replace(kind=TraceKind.WEIGHTED, shared=shared, factors=factors), name)
        return bool(values)

    def follow_other(
        self,
        frames: list[ModuleFrame],
        role: Role | None,
        name: str,
        args: Any,
        kwargs: Any,
        x: Tensor,
        trace: Trace,
        others: list[Tensor],
        results: list[Tensor],
    ) -> None:
        """Follow the results that any other function computes from scores or weights."""
        scales = role is Role.MULTIPLY and others and results[0].numel() > x.numel()
        gates = role is Role.ADD and others and trace.kind is TraceKind.WEIGHTS and not trace.pairs
        is_square = role is Role.MULTIPLY and len(args) == 2 and args[0] is args[1]
        is_activation = trace.kind is TraceKind.SCORES and (is_square or is_nonlinear(role, args))
        is_activation = is_activation and not guards_norm(name, args, kwargs, trace.changes)
        is_of_features = is_activation and sums_tokens(self, frames, self.find(x) or trace)
        if scales or gates or is_of_features or (is_activation and not (trace.pairs or strip_affixes(name).startswith("exp"))):
            self.drop(results[0])
            return
        if trace.kind is TraceKind.SCORES and strip_affixes(name) in DECOMPOSES:
            return
        if is_activation:
            before = self.find(x)
            scored = trace if before is None else activate(before, "square" if is_square else strip_affixes(name))
            trace = trace._replace(
                kind=TraceKind.WEIGHTS,
                function=strip_affixes(name),
                size=results[0].numel(),
                activated=scored.activated,
            )
        elif role is Role.LOG:
            trace = trace._replace(kind=TraceKind.SCORES)
        elif trace.kind is TraceKind.WEIGHTS and trace.activated is not None and (is_square or is_nonlinear(role, args)):
            trace = activate(trace, "square" if is_square else strip_affixes(name))
        for y in results:
            if y.dim() or x.numel() == 1 or role is None:
                self.follow(y, trace if trace.size <= y.numel() else trace._replace(size=y.numel()), name)
            else:
                self.drop(y)  # a loss, or a mean of all

    def follow_sum(
        self,
        role: Role | None,
        name: str,
        args: Any,
        kwargs: Any,
        x: Tensor,
        trace: Trace,
        several: bool,
        others: list[Tensor],
        results: list[Tensor],
    ) -> HandwrittenCall | None:
        """Follow weighted values; return the call of attention where they are summed over the keys, or None.

        A sum with other tokens, or a convolution, ends the following. What is not all entries is no product of the weights.
        """
        y = results[0]
        if role is Role.SUM:
            along = trace.shared and (not trace.extent or x.numel() == trace.extent * y.numel())
            if (trace.pairs or along) and (y.numel() < x.numel() or strip_affixes(name) not in ("sum", "mean")):
                product = None if trace.factors is None else label_sum(label_entries(*trace.factors), name, args, kwargs)
                call = self.complete_call(trace, x if trace.factors is None else trace.factors[0], product, "mul", name)
                edges = None if trace.factors is None else find_edge_sum(name, args, kwargs, trace.factors[1])
                return call._replace(edges=edges)
        if role is Role.ADD and several and trace.pairs:
            return self.complete_call(trace, x, None, "mul", name)
        for one in results:
            if role in (Role.SUM, Role.CONVOLUTION) or (role is Role.ADD and others) or name in FRESH:
                self.drop(one)
            else:
                self.follow(one, trace if keeps_entries(name, args, x, one) else trace._replace(factors=None), name)
        return None

    def complete_call(self, trace: Trace, x: Tensor, product: LabelledProduct | None, *names: str) -> HandwrittenCall:
        """Return the call that a product of weights x with values completes, and stop following the weights."""
        trace_of_weights = None if trace.factors is None else self.find(x)
        trace = trace if trace_of_weights is None else trace_of_weights._replace(function=trace.function)
        self.drop(x)
        if trace.kind is TraceKind.WEIGHTS:
            self.used.put(x, trace)
        x, trace, product = restore_keys(self.table, *drop_repeats(self.table, x, trace, product))
        steps = [trace.function, *map(strip_affixes, names)]
        place = 0 if product is None else product.find_place(x)
        return HandwrittenCall(f"{', '.join(steps[:-1])} and {steps[-1]}", trace, x, product, place)


def keeps_entries(name: str, args: Any, x: Tensor, y: Tensor) -> bool:
    """Return whether the result y of a function of x has the numbers of x in another layout: all of them, in the same order."""
    core = strip_affixes(name)
    is_view = core in VIEWS | COPIES or name in PERMUTES or (core == "getitem" and is_view_index(args[1]))
    return is_view and x.numel() == y.numel()


def list_followable(result: Any) -> list[Tensor]:
    """Return the tensors that can be followed among a function's result."""
    return [y for y in ([result] if isinstance(result, Tensor) else list_entries(result)) if is_followable(y)]


def is_maximum_of_two(name: str, args: Any, kwargs: Any) -> bool:
    """Return whether a function is torch.max of two tensors, which is torch.maximum."""
    return name == "max" and isinstance(args[1] if len(args) > 1 else kwargs.get("other"), Tensor)


def scores_channels(frame: ModuleFrame, x: TensorRef, shape: torch.Size, axis: int) -> bool:
    """Return whether a softmax over an axis before the last is of scores x of pairs of tokens, one for each channel."""
    return len(shape) > 2 and axis % len(shape) != len(shape) - 1 and is_broadcast_pair(frame, x, shape.numel())


def find_dim(name: str, args: Any) -> Any:
    """Return the dimension along which a function of this name orders entries, by default the last."""
    place = 2 if strip_affixes(name) == "topk" else 1
    return args[place] if len(args) > place else -1


def activate(trace: Trace, name: str) -> Trace:
    """Return the trace of scores or weights with one more function that turned each score into a weight."""
    if trace.activated is not None:
        return trace._replace(activated=trace.activated._replace(functions=(*trace.activated.functions, name)))
    return trace._replace(activated=None if trace.form is None else ActivatedScores(trace.form, (name,)))


def describe_mixing(name: str, x: Tensor, y: Tensor) -> str:
    """Return a function's name, with what it does where it mixes the heads of scores or weights x."""
    return f"{name}, which mixes the heads," if x.dim() > 2 and x.shape == y.shape else name


def has_projection(module: nn.Module) -> bool:
    """Return whether a module that cannot attend has a layer that may mix heads: others, as a bias of positions, do not."""
    return any(isinstance(part, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d) for part in module.modules())


def keep_undropped(trace: Trace, x: Tensor) -> Trace:
    """Return the trace of dropped weights with the weights x before dropout."""
    return trace if trace.undropped or trace.dims is None else trace._replace(undropped=(x.detach(), trace.dims))


def is_square_of_one_hot(frame: ModuleFrame, operands: list[Tensor], y: Tensor) -> bool:
    """Return whether y has as many rows as columns, and operands made from one index: one-hot tokens attend to each other."""
    if y.dim() < 2 or y.shape[-1] != y.shape[-2]:
        return False
    common = set.intersection(*(find_ancestors([frame], x) for x in operands))
    makers = [maker for x in operands if (maker := skip_layouts(frame, weakref.ref(x))) is not None]
    return any(id(one) in common for maker in makers if infer_role(maker.name) is Role.ONE_HOT for one in maker.given)


def is_head_mixing(x: Tensor, y: Tensor, weights: list[Tensor]) -> bool:
    """Return whether small matrices mixed the heads of scores or weights, which then keep their shape."""
    return sorted(x.shape) == sorted(y.shape) and all(one.numel() <= MAX_MIXING_ENTRIES for one in weights)
