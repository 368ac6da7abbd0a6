"""Products that sum over an axis, distances, and sums by an index: they make scores, or complete a call of attention."""

import weakref
from typing import Any

from torch import Tensor, nn

from regard.observe.interception.function_roles import Role
from regard.observe.interception.handwritten.ancestors.ancestor_search import has_tokens
from regard.observe.interception.handwritten.handwritten_call import HandwrittenCall
from regard.observe.interception.handwritten.product_roles import (
    is_factor,
    is_score_matrix,
    is_sum_of_heads,
    is_sum_of_scores,
    is_value,
    makes_features,
    multiplies_features,
    sums_softmax,
)
from regard.observe.interception.handwritten.products.labelled_product import (
    find_operands,
    label_product,
)
from regard.observe.interception.handwritten.products.traces import TraceKind, join_roots
from regard.observe.interception.handwritten.scores.head_mixing import is_head_mixing, mix_heads
from regard.observe.interception.handwritten.weight_tracker import WeightTracker
from regard.observe.interception.provenance import CONSTANT, ModuleFrame


class ProductTracker(WeightTracker):
    """The scores and weights of one forward, by the products and sums that make them or multiply them with values."""

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
            values = values and not (is_sum_of_scores(trace, x, product) or is_sum_of_heads(self, trace, x, product))
            values = values and not (are_feature_maps or is_factor(name, args, operands, x))
            if values and trace.pairs:
                return self.complete_call(trace, x, product, name)
            if trace.kind is TraceKind.WEIGHTS and not trace.pairs and sums_softmax(self, x, trace, product):
                self.report_other_weights(x, trace, name)
            learned = any(isinstance(v, nn.Parameter) for v in others)
            if trace.kind is TraceKind.WEIGHTED and trace.pairs and not learned:
                return self.complete_call(trace, x, None, "mul", name)  # with ones
            undecided = trace.kind is TraceKind.SCORES and trace.pairs
            undecided = undecided and not any(is_score_matrix(self, frames[-1], v) for v in others)
            if undecided and any(is_value(self, frames[-1], v, trace) for v in others):
                frames[-1].multiplies_scores = True  # linear attention, or other algebra
        self.drop(y)
        token_operands = [x for x in operands if has_tokens(frames[-1], x)]
        if len(token_operands) == 1 < len(operands) and role is Role.PRODUCT and is_first_state(frames[-1], operands):
            token_operands = operands
        if len(token_operands) > 1:
            if role is Role.PRODUCT and product is not None and makes_features(product):
                return None
            is_outer = not (product is not None and product.sums_several()) and operands[0].shape[-1:] == (1,)
            if role is Role.DISTANCE or not is_outer:
                weights = len(traced) == len(operands) and all(trace.kind is TraceKind.WEIGHTS for _, trace in traced)
                if weights and not are_feature_maps:
                    dims, function = self.table.add_dims(y.shape), traced[0][1].function
                    self.start(y, TraceKind.WEIGHTS, pairs=True, roots=join_roots(traced), function=function, dims=dims)
                else:
                    pair = token_operands[0], token_operands[1]
                    self.start_scores(frames, y, pair, product, roots=join_roots(traced) if are_feature_maps else 0)
        elif traced:
            x, trace = traced[0]
            if trace.kind is not TraceKind.WEIGHTED and is_head_mixing(x, y, [v for v in operands if v is not x]):
                self.follow(y, mix_heads(self.table, trace, x, y, product, name))
        elif token_operands and y.numel() < token_operands[0].numel():
            self.follow_features(frames, role, token_operands[0], y)
        return None


def is_first_state(frame: ModuleFrame, operands: list[Tensor]) -> bool:
    """Return whether one of two operands is a state of zeros, from which a decoder starts, of one query for each row."""
    zeros = [x for x in operands if frame.find_contents(weakref.ref(x)) == CONSTANT and not isinstance(x, nn.Parameter)]
    return len(operands) == 2 and len(zeros) == 1 and zeros[0].is_floating_point() and not bool(zeros[0].any())
