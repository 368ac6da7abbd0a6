"""Linear attention in its quadratic order: scores of queries and keys that are multiplied with values as they are.

That scores times values are attention, and not any algebra of three tensors, is known by one of
- a mask of pairs of as many queries as keys, whose scores are 0: causal, on one side of a diagonal, or a band;
- rows that were divided by their sums, or by the number of keys;
- queries that are a softmax over their features, or keys that are one over the keys;
- feature maps that made both queries and keys, of no fewer tokens than there are keys: not the weights of a hypernetwork;
- layers that made queries, keys and values of tokens, and products that have these tokens as rows.
"""

import math
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from regard.map.scored_matrix import IDENTITY
from regard.observe.interception.handwritten.ancestors.feature_maps import is_feature_map
from regard.observe.interception.handwritten.ancestors.query_axes import are_all_rows, list_axes
from regard.observe.interception.handwritten.linear.linear_attention import (
    TITLE,
    ChainRoles,
    are_projected_tokens,
    is_attention,
    mixes_within_tokens,
)
from regard.observe.interception.handwritten.linear.linear_product import LinearProduct
from regard.observe.interception.handwritten.products.score_form import ScoreForm, ScoreStep, StepKind
from regard.observe.interception.handwritten.products.tensor_axes import AxisTable, Dims
from regard.observe.interception.handwritten.products.traces import ActivatedScores, Trace, TraceKind
from regard.observe.interception.provenance import ModuleFrame

CHAINED = "its weights are the product of two matrices of scores, each with a mask, which is not followed"
ROUNDED = 1e-6  # of one over the number of keys, in float32
SUM_ROUNDINGS = 64  # of the sum of weights, relative to the sum of their sizes


def find_roles_of_scores(
    made: LinearProduct,
    table: AxisTable,
    list_softmax_axes: Callable[[Tensor, Dims], set[int]],
) -> ChainRoles | None:
    """Return the roles of the operands of scores and of the values they are multiplied with; None if it is no attention.

    list_softmax_axes(q, q_dims) are the axes along which a softmax made an operand.
    """
    frames, product, x, trace, place = made.frames, made.product, made.x, made.trace, made.place
    form = trace.form
    if form is None or trace.dims is None or not x.numel():
        return None
    dims = product.build_dims(table, {place: trace.dims})
    a, b, of_scores = (list_axes(table, one) for one in (form.a_dims, form.b_dims, form.dims))
    keys = list_axes(table, trace.dims) - list_axes(table, dims[2])
    sides = ((form.a, form.a_dims), (form.b, form.b_dims))
    if not keys or (keys <= a) == (keys <= b) or keys & a & b:
        return None  # the summed axis is not of the keys alone
    running = [list_axes(table, step.dims) for step in form.steps if step.kind is StepKind.CUMSUM]
    if any(not axes or not axes <= a ^ b for axes in running):
        return None  # products of the features of a token, summed over tokens
    (q, q_dims), (k, k_dims) = sides if keys <= b else sides[::-1]
    v, v_dims = product.operands[1 - place], dims[1 - place]
    features = (a & b) - of_scores
    queries = (a | b) & of_scores - keys - (a & b)
    queries = queries - {*table.expand_axes(form.shared)} or queries  # without heads that share keys
    scores = arrange_scores(table, x, trace.dims, queries, keys)
    is_masked = scores is not None and scores.shape[-2] == scores.shape[-1] and hides_pairs(table, form, queries | keys)
    summed = [label for label in product.labels[place] if label not in product.result]
    if not is_masked and mixes_within_tokens(frames, product, summed):
        return None
    is_causal = scores is not None and is_masked and has_later_zeros(scores)
    has_unit_sums = scores is not None and divides_rows(table, form, queries) and has_unit_rows(scores)
    has_softmax = features <= list_softmax_axes(q, q_dims) or keys <= list_softmax_axes(k, k_dims)
    has_weights = is_masked or has_unit_sums or has_softmax or divides_by_count(table, form, keys)
    has_weights = has_weights or all(is_feature_map(frames, (weakref.ref(one), one.numel())) for one in (q, k))
    roles = ChainRoles(q, k, v, q_dims, k_dims, v_dims, features, keys, dims[2], is_causal, is_masked)
    is_raw = not (trace.extent or form.has_running_sum)  # no softmax and no sums of them
    is_known = has_weights or (is_raw and are_projected_tokens(frames, table, roles, may_share=True))
    return roles if is_known and is_attention(frames, table, roles) else None


def find_roles_of_one_token(made: LinearProduct, table: AxisTable) -> ChainRoles | None:
    """Return the roles of the score of each token with itself, which its value is multiplied by; None for other products.

    So it is in chunks of one token. The first operand of the scores is taken to be the queries.
    """
    form, place = made.trace.form, made.place
    if form is None or made.trace.dims is None or not made.x.numel() or made.product.sums_several():
        return None
    a, b, rows = (list_axes(table, one) for one in (form.a_dims, form.b_dims, made.trace.dims))
    dims, features = made.product.build_dims(table, {place: made.trace.dims}), (a & b) - rows
    v_dims = dims[1 - place]
    of_values = list_axes(table, v_dims)
    if not features or not a == b == rows | features or not rows < of_values == list_axes(table, dims[2]):
        return None
    v = made.product.operands[1 - place]
    return ChainRoles(form.a, form.b, v, form.a_dims, form.b_dims, v_dims, features, set(), dims[2], True, is_masked=True)


def fills_with_zeros(form: ScoreForm | None) -> bool:
    """Return whether scores were masked by zeros, perhaps those of a single token, where nothing is hidden."""
    return form is not None and any(step.kind is StepKind.FILL and not step.amount for step in form.steps)


def are_only_multiplied(form: ScoreForm | None) -> bool:
    """Return whether scores were multiplied, as by decays, or masked by zeros, and nothing else was done."""
    steps = [] if form is None else form.steps
    are_factors = all(step.kind is StepKind.MULTIPLY or (step.kind is StepKind.FILL and not step.amount) for step in steps)
    return are_factors and form is not None


def are_of_all_tokens(frames: list[ModuleFrame], table: AxisTable, roles: ChainRoles) -> bool:
    """Return whether scores are of all tokens of a module: an axis of its inputs is as long as that of the keys.

    Masked scores of other tokens are of a chunk, beside which a layer keeps a state.
    """
    frame, t = frames[-1], math.prod(table.get_sizes([*roles.keys]))
    if not roles.is_masked or not frame.input_tensors or t in list_token_lengths(frame, table, roles):
        return True
    return t in frame.list_lengths() and are_all_rows(frames, table, roles.k, roles.k_dims, roles.keys)


def list_token_lengths(frame: ModuleFrame, table: AxisTable, roles: ChainRoles) -> set[int]:
    """Return the lengths of a module's inputs that may be those of tokens: the longest, and those of no batch rows or heads.

    A chunk may be as long as the batch.
    """
    rows = (list_axes(table, roles.q_dims) & list_axes(table, roles.v_dims)) - roles.keys
    sizes, lengths = {*table.get_sizes([*rows])}, frame.list_lengths()
    return {n for n in lengths if n not in sizes or n == max(lengths)}


def weigh_linearly(trace: Trace) -> Trace:
    """Return the trace of scores as weights, with a formula without tables of queries and keys."""
    form = trace.form
    assert form is not None
    steps = tuple(step for step in form.steps if not is_table(step))
    activated = ActivatedScores(form._replace(steps=steps), (IDENTITY,))
    return trace._replace(kind=TraceKind.WEIGHTS, function=TITLE, activated=activated)


def is_table(step: ScoreStep) -> bool:
    """Return whether a step fills scores or multiplies them by a number for each query and key."""
    x = step.operand
    is_matrix = isinstance(x, Tensor) and x.dim() > 1 and min(x.shape[-2:]) > 1
    return step.kind is StepKind.FILL or (step.kind is StepKind.MULTIPLY and is_matrix)


def arrange_scores(table: AxisTable, x: Tensor, dims: Dims, queries: set[int], keys: set[int]) -> Tensor | None:
    """Return scores with queries and keys last; None if they have no dimension of each alone."""
    own = [{*axes} for axes in table.expand_dims(dims)]
    if queries not in own or keys not in own or not queries:
        return None
    return x.detach().movedim((own.index(queries), own.index(keys)), (-2, -1))


def hides_pairs(table: AxisTable, form: ScoreForm, axes: set[int]) -> bool:
    """Return whether scores with these axes of queries and keys were filled with 0, or multiplied by it, outside of a band."""
    for step in form.steps:
        x = step.operand
        if not isinstance(x, Tensor) or x.dim() < 2 or not x.numel() or not axes <= list_axes(table, step.dims):
            continue
        if step.kind is StepKind.MULTIPLY or (step.kind is StepKind.FILL and not step.amount):
            first = x.detach().reshape(-1, *x.shape[-2:])[0]
            if is_outside_of_band(first == 0 if step.kind is StepKind.MULTIPLY else first != 0):
                return True
    return False


def is_outside_of_band(hidden: Tensor) -> bool:
    """Return whether a table is False in a band around a diagonal and True beside it, as no table of channels is."""
    rows, columns = (torch.arange(n, device=hidden.device) for n in hidden.shape)
    offsets = columns - rows[:, None]
    seen = offsets[~hidden]
    if not seen.numel() or seen.numel() == hidden.numel():
        return False
    return torch.equal(hidden, (offsets < seen.min()) | (offsets > seen.max()))


def has_later_zeros(scores: Tensor) -> bool:
    """Return whether each query has a score of 0 for all later keys, and some have others for earlier ones."""
    return not bool(scores.triu(1).any()) and bool(scores.tril(-1).any())


def divides_rows(table: AxisTable, form: ScoreForm, queries: set[int]) -> bool:
    """Return whether scores were multiplied or divided by a tensor with a number for each query."""
    steps = [step for step in form.steps if step.kind is StepKind.MULTIPLY and isinstance(step.operand, Tensor)]
    return any(queries <= list_axes(table, step.dims) for step in steps)


def divides_by_count(table: AxisTable, form: ScoreForm, keys: set[int]) -> bool:
    """Return whether scores were divided by the number of keys, as those of non-local blocks. https://arxiv.org/abs/1711.07971"""
    count = math.prod(table.get_sizes([*keys]))
    factors = [step.operand for step in form.steps if step.kind is StepKind.MULTIPLY]
    numbers = [float(one) for one in factors if isinstance(one, float) or (isinstance(one, Tensor) and one.numel() == 1)]
    return any(math.isclose(one * count, 1, rel_tol=ROUNDED) for one in numbers)


def has_unit_rows(scores: Tensor) -> bool:
    """Return whether the rows of scores sum to 1, up to rounding or an epsilon beside the sums."""
    bound = scores.abs().sum(-1) * (SUM_ROUNDINGS * torch.finfo(scores.dtype).eps) + 1e-3
    return bool(((scores.sum(-1) - 1).abs() <= bound).all())
