"""Products that sum over an axis, distances, and sums by an index: they make scores, or complete a call of attention."""

import weakref
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from regard.observe.interception.function_roles import Role, strip_affixes
from regard.observe.interception.handwritten.ancestors.ancestor_search import has_tokens
from regard.observe.interception.handwritten.handwritten_call import HandwrittenCall
from regard.observe.interception.handwritten.linear.changeable_contexts import ChangeableContexts
from regard.observe.interception.handwritten.linear.chunk_loops import FoundCall
from regard.observe.interception.handwritten.linear.corrected_values import are_corrected
from regard.observe.interception.handwritten.linear.gated_sums import MOVED, GatedSums
from regard.observe.interception.handwritten.linear.lambda_layers import LAMBDAS, UNREAD_LAMBDAS, Summary, read_summary
from regard.observe.interception.handwritten.linear.linear_attention import ChainRoles
from regard.observe.interception.handwritten.linear.linear_product import LinearProduct
from regard.observe.interception.handwritten.linear.linear_scores import (
    CHAINED,
    are_of_all_tokens,
    are_only_multiplied,
    fills_with_zeros,
    find_roles_of_one_token,
    find_roles_of_scores,
    is_table,
    weigh_linearly,
)
from regard.observe.interception.handwritten.product_roles import (
    is_attention_product,
    is_factor,
    is_normalized_twice,
    is_product_of_masked_scores,
    is_score_matrix,
    is_sum_of_heads,
    is_sum_of_scores,
    is_value,
    list_softmax_axes,
    makes_features,
    multiplies_features,
    sums_tokens,
)
from regard.observe.interception.handwritten.products.contraction import find_operands
from regard.observe.interception.handwritten.products.entry_products import EntryProducts
from regard.observe.interception.handwritten.products.labelled_product import (
    LabelledProduct,
    label_product,
    label_sum,
    separate_factors,
)
from regard.observe.interception.handwritten.products.traces import TraceKind, join_roots
from regard.observe.interception.handwritten.recurrences.outer_products import is_of_one_token
from regard.observe.interception.handwritten.scores.entry_sources import drop_repeats
from regard.observe.interception.handwritten.scores.head_mixing import is_head_mixing, mix_heads
from regard.observe.interception.handwritten.softmax.attention_free import TableProducts
from regard.observe.interception.handwritten.softmax.divided_exponentials import find_exponential
from regard.observe.interception.handwritten.softmax.edge_call import is_edge_softmax
from regard.observe.interception.handwritten.softmax.edge_softmax import EdgeExponentials, sums_edges
from regard.observe.interception.handwritten.softmax.index_matrices import find_index, is_square_of_one_hot
from regard.observe.interception.handwritten.softmax.merged_blocks import MergedBlocks
from regard.observe.interception.handwritten.softmax.pair_loops import divides_by_loop
from regard.observe.interception.handwritten.weight_tracker import WeightTracker
from regard.observe.interception.provenance import CONSTANT, ModuleFrame

MEMORIES = (
    "it is external attention, whose weights are a softmax over the tokens that is divided by its sums over memories, values "
    "that all inputs share and that are no tokens"
)


class ProductTracker(WeightTracker):
    """The scores and weights of one forward, by the products and sums that make them or multiply them with values."""

    def __init__(self) -> None:
        super().__init__()
        self.edges = EdgeExponentials()
        self.entry_products = EntryProducts()
        self.linear = ChangeableContexts(self.table)
        self.tables = TableProducts()
        self.gated_sums = GatedSums()
        self.merged_blocks = MergedBlocks()
        self.summaries = WeakTensorKeyDictionary()  # sums of values by a softmax of no pairs, with their owners
        self.has_exponentials = False  # whether an exponential has run
        self.has_gates = False  # whether a sigmoid or another positive function of scores has run

    def clear(self) -> None:
        """Forget all followed tensors."""
        super().clear()
        self.edges.weighted.clear()
        self.entry_products.clear()
        self.linear.clear()
        self.tables.clear()
        self.gated_sums.clear()
        self.merged_blocks.clear()
        self.summaries.clear()
        self.has_exponentials = False
        self.has_gates = False

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
            if values and trace.form is None and not trace.extent:
                values = not sums_edges(frames[-1], weakref.ref(x), [weakref.ref(v) for v in others])
            if values and (trace.pairs or is_attention_product(self, frames, name, args, operands, x, trace, product)):
                if not trace.pairs and self.start_linear_call(frames, name, args, kwargs, others, y):
                    return None
                return self.complete_call(trace, x, product, name)
            learned = any(isinstance(v, nn.Parameter) for v in others)
            if trace.kind is TraceKind.WEIGHTED and (trace.pairs or trace.shared) and not learned:
                return self.complete_call(trace, x, None, "mul", name)  # with ones
            if learned and product is not None and len(summed := product.list_summed_dims(x)) == 1:
                self.miss_memories(frames, x, summed[0], name, y)
            undecided = trace.kind is TraceKind.SCORES and trace.pairs
            undecided = undecided and not any(is_score_matrix(self, frames[-1], v, trace) for v in others)
            if undecided and any(is_value(self, frames[-1], v, trace) for v in others):
                if is_product_of_masked_scores(self, frames[-1], trace):
                    self.linear.miss_call(frames, name, CHAINED, y)
                    self.drop(y)
                    return None
                product_of_scores, factors = separate_factors(name, args, kwargs, x)
                distinct = drop_repeats(self.table, x, trace, product_of_scores)
                if distinct[2] is not None and distinct[2].count_results() == y.numel():  # else both operands were repeated
                    x, trace, product_of_scores = distinct
                if product_of_scores is not None:
                    made = LinearProduct(frames, name, product_of_scores, factors, x, trace, y)
                    may_be_states = sums_tokens(self, frames, trace) is not False  # products of keys with values
                    if may_be_states and self.linear.start_call(made):
                        self.drop(y)
                        return None
                    roles = find_roles_of_scores(made, self.table, partial(list_softmax_axes, self))
                    if roles is not None:
                        return self.follow_linear_scores(made, roles)
                    if self.follow_chunk_of_one(made):
                        return None
                frames[-1].multiplies_scores = True  # linear attention in the other order, or other algebra
        self.drop(y)
        if self.has_exponentials and not traced and product is not None and self.tables.add(frames[-1], product, y):
            return None
        token_operands = [x for x in operands if has_tokens(frames[-1], x)]
        may_be_lambdas = len(self.summaries) > 0 and len(token_operands) > 1 and not traced
        if may_be_lambdas and product is not None and self.follow_lambdas(frames, name, product, y):
            return None
        if len(token_operands) == 1 < len(operands) and role is Role.PRODUCT and is_first_state(frames[-1], operands):
            token_operands = operands
        if len(operands) > 1 and token_operands and (index := find_index(self, frames[-1], operands, product)) is not None:
            started = self.count
            call = self.follow_edges(frames[-1], name, args, kwargs, [x for x in token_operands if x is not index])
            is_pick = len(token_operands) > 1 and not is_square_of_one_hot(frames[-1], token_operands, y)
            if call is not None or self.count > started or is_pick:
                return call
        if len(token_operands) > 1:
            if role is Role.PRODUCT and product is not None and makes_features(frames, product):
                return None
            is_outer = not (product is not None and product.sums_several()) and (
                operands[0].shape[-1:] == (1,)
                or (name == "einsum" and any(is_of_one_token(frames[-1], x) for x in token_operands))
            )
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
                self.follow(y, mix_heads(self.table, trace, x, y, product, name))
        elif token_operands and y.numel() < token_operands[0].numel():
            self.follow_features(frames, token_operands[0], y)
        return None

    def add_summary(self, context: Tensor, owners: Any, product: LabelledProduct | None, place: int) -> None:
        """Keep the context of a softmax of no pairs, operand `place` of a product, with the watchers of its module."""
        self.summaries[context if context._base is None else context._base] = Summary(owners, product, place)

    def follow_lambdas(self, frames: list[ModuleFrame], name: str, product: LabelledProduct, y: Tensor) -> bool:
        """Follow y as linear attention if it is queries times sums of values, as in a lambda layer; return whether it is."""
        bases = [x if x._base is None else x._base for x in product.operands]
        place = next((n for n, x in enumerate(bases) if x in self.summaries), None)
        if place is None or bases[0] is bases[1]:
            return False
        summary = self.summaries[bases[place]]
        found = read_summary(self.table, summary, product, place)
        is_read = False
        if found is not None:
            roles, trace = found
            made = LinearProduct(frames, name, product, [], product.operands[place], trace, y)
            is_read = self.linear.start_call_of_scores(made, roles)
        for watcher, module in summary.owners:
            watcher.handle_unread_part(LAMBDAS if is_read else UNREAD_LAMBDAS, module)
        return is_read

    def miss_memories(self, frames: list[ModuleFrame], x: Tensor, dim: int, name: str, y: Tensor) -> None:
        """Report y, the product of x with learned values over a dimension, if x are the weights of external attention."""
        trace = self.find(x)
        if trace is not None and is_normalized_twice(self, x, trace, dim):
            kernel = f"by hand: {trace.function} and {strip_affixes(name)}"
            own = [one for one in frames if not type(one.module).__module__.startswith("torch.nn.modules.")]
            frame = weakref.ref((own or frames)[-1])
            self.linear.found.append(FoundCall(frame, kernel, None, MEMORIES, output=weakref.ref(y)))

    def follow_linear_scores(self, made: LinearProduct, roles: ChainRoles) -> HandwrittenCall | None:
        """Follow a product of scores with values as linear attention; return a call with stored weights if need be."""
        frame = made.frames[-1]
        is_chunk = roles.is_masked and (self.linear.has_chunks(frame) or are_corrected(frame, roles.v, roles.k))
        if is_chunk or not are_of_all_tokens(made.frames, self.table, roles):
            self.linear.start_chunk(made, roles)
        elif not self.linear.start_call_of_scores(made, roles):
            return self.complete_call(weigh_linearly(made.trace), made.x, made.product, made.name)
        self.drop(made.y)
        return None

    def follow_chunk_of_one(self, made: LinearProduct) -> bool:
        """Follow the scores of chunks of one token, times values, beside which a layer keeps a state; return whether it may.

        They are masked as those of longer chunks, or stand beside these, as the last one of an odd number of tokens. Others
        are only chunks if what they are added to is a product of tokens, or of tokens with a state.
        """
        frame, is_multiplied = made.frames[-1], are_only_multiplied(made.trace.form)
        is_sure = (is_multiplied and fills_with_zeros(made.trace.form)) or self.linear.has_chunks(frame)
        roles = find_roles_of_one_token(made, self.table) if is_sure or is_multiplied else None
        if roles is not None:
            frame.multiplies_scores |= not is_sure
            self.linear.start_chunk(made, roles, is_sure)
            self.drop(made.y)
        return roles is not None

    def start_linear_call(
        self, frames: list[ModuleFrame], name: str, args: Any, kwargs: Any, operands: list[Tensor], y: Tensor
    ) -> bool:
        """Start linear attention if one of the operands that a softmax is multiplied with to y is products of keys with values.

        The softmax is then a feature map of the queries. Return whether it is one.
        """
        for x, trace in self.find_all(operands):
            if trace.kind is TraceKind.SCORES and trace.pairs:
                product, factors = separate_factors(name, args, kwargs, x)
                made = None if product is None else LinearProduct(frames, name, product, factors, x, trace, y)
                if made is not None and self.linear.start_call(made, has_softmax=True):
                    self.drop(y)
                    return True
        return False

    def follow_summed_product(
        self, frames: list[ModuleFrame], name: str, args: Any, kwargs: Any, x: Tensor, y: Tensor
    ) -> tuple[bool, HandwrittenCall | None]:
        """Follow y, the sum of entries x that are products of two tensors.

        Return whether that is all there is to follow, and the call of attention that it completes, if it completes one.
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
                made = LinearProduct(frames, "mul and sum", summed, factors, operand, trace, y)
                if self.linear.start_call(made):
                    return True, None
                if trace.kind is not TraceKind.SCORES or trace.form is None or not any(map(is_table, trace.form.steps)):
                    continue
                roles = find_roles_of_scores(made, self.table, partial(list_softmax_axes, self))
                if roles is not None:
                    return True, self.follow_linear_scores(made, roles)
            elif all(has_tokens(frames[-1], one) for one in product.operands):
                self.start_scores(frames, x if is_running else y, product.operands, summed, factors)
                return not is_running, None
        return False, None

    def follow_gated_sum(self, frames: list[ModuleFrame], name: str, args: Any, kwargs: Any, y: Tensor) -> bool:
        """Follow y as linear attention if it is queries times a sum over tokens of keys times values; return whether it is.

        It may be such a sum that is scaled, too.
        """
        if not len(self.gated_sums.sums):
            return False
        found = self.gated_sums.find_product(frames, name, args, y)
        if found is None:
            self.gated_sums.add_scaled(frames[-1], name, args, kwargs, y)
            return False
        reason = found.summed.explain_unread()
        parts = None if reason else found.find_roles(self.table, y)
        if parts is None:
            self.linear.miss_call(frames, name, reason or MOVED, y)
            return True
        roles, trace = parts
        x = found.multiplied.operands[found.place]
        return self.linear.start_call_of_scores(LinearProduct(frames, name, found.multiplied, [], x, trace, y), roles)

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


def is_first_state(frame: ModuleFrame, operands: list[Tensor]) -> bool:
    """Return whether one of two operands is a state of zeros, from which a decoder starts, of one query for each row."""
    zeros = [x for x in operands if frame.find_contents(weakref.ref(x)) == CONSTANT and not isinstance(x, nn.Parameter)]
    return len(operands) == 2 and len(zeros) == 1 and zeros[0].is_floating_point() and not bool(zeros[0].any())
