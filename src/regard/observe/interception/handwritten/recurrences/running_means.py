"""Running means of values over tokens: sums of weights times values so far, over the sums of these weights.

``y_i = Σ_{j≤i} w_j v_j / Σ_{j≤i} w_j`` has the matrix ``M_ij = w_j / Σ_{k≤i} w_k``. Where weights are exponentials it is
attention with one row of scores, as of AFT without queries (https://arxiv.org/abs/2105.14103) and Aaren
(https://arxiv.org/abs/2405.13956).
"""

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.map.computed_bias import drop_repeated_axes
from regard.observe.interception.attention_call import CallAdapter
from regard.observe.interception.function_roles import Role, infer_role, strip_affixes
from regard.observe.interception.handwritten.ancestors.ancestor_search import TensorRef
from regard.observe.interception.handwritten.ancestors.layouts import is_layout
from regard.observe.interception.handwritten.ancestors.product_factors import Factor, label_factor, restore_factor
from regard.observe.interception.handwritten.products.labelled_product import align_labels
from regard.observe.interception.handwritten.products.score_form import PRODUCTS
from regard.observe.interception.handwritten.recurrences.channel_recurrence import build_factors
from regard.observe.interception.handwritten.recurrences.loop_recurrence import KERNEL
from regard.observe.interception.handwritten.recurrences.state_loop import RunningSum, SumKind
from regard.observe.interception.provenance import ModuleFrame
from regard.observe.interception.recurrent.recurrence_call import RecurrenceCall, build_read_call


@dataclass(eq=False)
class RunningMean:
    """Weights (b, t, ...) and values of all tokens along an axis, what their sums are multiplied by, and the means."""

    frame: ModuleFrame
    weights: Tensor
    values: Tensor
    scale: Tensor
    means: Tensor
    axis: int
    made: TensorRef

    def is_multiplied(self, outputs: set[int]) -> bool:
        """Return whether queries are multiplied with the means to outputs of linear attention, by the ids of references."""
        followed = {id(self.made)}
        for one in self.frame.list_operations():
            own = not followed.isdisjoint(map(id, one.given))
            if own and infer_role(one.name) in (Role.MULTIPLY, Role.PRODUCT) and not outputs.isdisjoint(map(id, one.results)):
                return True
            if own and is_layout(one):
                followed |= {*map(id, one.results)}
        return False


def list_factors(frame: ModuleFrame, x: Tensor) -> tuple[Tensor, ...]:
    """Return the factors whose product, entry by entry, a tensor is in a module, with its dimensions.

    Those that were freed are left out. None if it is no product of two.
    """
    makers = frame.find_makers(weakref.ref(x))
    maker = makers[-1] if makers else None
    if maker is None or maker.child is not None or len(maker.given) != 2 or strip_affixes(maker.name) not in PRODUCTS:
        return ()
    found = (restore_factor(frame, Factor(*one)) for one in zip(maker.given, maker.sizes, strict=True))
    labelled = (one._replace(labels=label_factor(one, x)) for one in found)
    return tuple(align_labels(*one.read(), [*range(x.dim())]) for one in labelled if one.labels is not None)


def find_mean(frame: ModuleFrame, total: RunningSum, divisor: RunningSum, by: Tensor, y: Tensor) -> RunningMean | None:
    """Return the mean that y is, running sums times 1 / by or by, if one factor of what was summed up is summed to `by`.

    The other factor is the values, which are computed anew if they were freed.
    """
    summed, given = total.decays, divisor.decays
    if total.kind is not SumKind.LOGS or total.axis != divisor.axis or y.shape != summed.shape or by.dim() != y.dim():
        return None
    for place, weights in enumerate(total.factors):
        is_same = weights.numel() == given.numel() and torch.equal(weights, given.reshape(weights.shape))
        others = total.factors[1 - place :][:1] if len(total.factors) == 2 else (summed / weights.where(weights != 0, 1),)
        if is_same and others[0].shape == y.shape:
            scale = by.detach() if divisor.sign < 0 else by.detach().reciprocal()
            values, means = others[0].clone(), y.detach().clone()  # which may be written into
            return RunningMean(frame, weights.clone(), values, scale.clone(), means, total.axis, weakref.ref(y))
    return None


def read_mean(found: RunningMean) -> tuple[RecurrenceCall, CallAdapter]:
    """Return running means as a call; they are computed already. Raises UnreadableError if they are others."""

    def arrange(x: Tensor) -> Tensor:
        """Return (b, t, ..., c) as (b, ..., c, t); a single text and a single channel may have no axis."""
        x = x.unsqueeze(0 if found.axis == 0 else 2) if x.dim() == 2 else x
        return x.movedim(found.axis + (found.means.dim() == 2 and found.axis == 0), -1)

    weights, values, scale, means = map(arrange, (found.weights, found.values, found.scale, found.means))
    ones = means.new_ones(()).expand(*[1] * (means.dim() - 1), means.shape[-1])
    parts = {"decay": ones, "key_scale": drop_repeated_axes(weights), "q": drop_repeated_axes(scale)}
    factors = build_factors(parts, values, means, is_strict=False)
    return build_read_call(KERNEL.format("cumsum"), factors), CallAdapter(lambda: None)
