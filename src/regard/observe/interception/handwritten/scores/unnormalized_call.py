"""The call behind handwritten weights that are no softmax: scores that are activated or decay, mixed softmaxes, or a matrix.

The formula comes from the operations that were followed. What they do not state, as the factor of a row or how heads are
mixed, is solved for from the model's own weights of the same forward, and the formula is compared with these. Where they
differ, or no formula is known, the weights themselves are stored.
"""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from regard.map.scored_matrix import ScoredMatrix
from regard.map.stored_matrix import StoredMatrix
from regard.mechanism.heads import share
from regard.mechanism.masks import Given
from regard.mechanism.scores import score_dtype
from regard.observe.interception.attention_call import AttentionCall
from regard.observe.interception.handwritten.products.tensor_axes import AxisTable
from regard.observe.interception.handwritten.products.traces import Trace
from regard.observe.interception.handwritten.scores.activated_scores import (
    ACTIVATION_NAMES,
    choose_rows,
    compute_activation,
    find_score_limit,
    read_scores,
    solve_activation,
)
from regard.observe.interception.handwritten.scores.axis_groups import Groups, describe_choice
from regard.observe.interception.handwritten.scores.score_formula import resolve_form
from regard.observe.interception.handwritten.scores.stored_weights import LIMIT_BYTES
from regard.observe.interception.plain_tensors import UnreadableError
from regard.observe.interception.recurrent.recurrence_call import RecurrenceCall, RecurrenceFactors, sample_state

SPARE_EQUATIONS = 8  # for each number that is solved for
UNKNOWN = "attention of activated scores"  # by a formula that no name stands for


def build_unnormalized_call(
    trace: Trace, table: AxisTable, groups: Groups, weights: Tensor, v: Tensor, context: Tensor, kernel: str, reason: str
) -> RecurrenceCall:
    """Return the call of which `weights` (b, h, q, k) are the weights and `context` (b, h, q, e) the output, from values v."""
    (b, h, n, t), e = weights.shape, v.shape[3]
    values = share(v.detach().expand(b, -1, -1, -1), h).contiguous()
    mechanism: ScoredMatrix | StoredMatrix | None = None
    title, note = describe_kind(trace), ""
    for solve in (solve_activation, solve_mixture):
        try:
            mechanism = mechanism or solve(trace, table, groups, weights, kernel)
        except UnreadableError as error:
            reason = str(error)
            title = UNKNOWN if solve is solve_activation else title
    is_larger = mechanism is not None and sum(x.nbytes for x in mechanism.tensors.values()) > weights.nbytes
    if mechanism is None or (is_larger and n < t):  # the few rows of a step are less than all of its keys
        if weights.nbytes > LIMIT_BYTES:
            raise UnreadableError(f"{reason}, and its weights as they are would take {weights.nbytes:,} bytes")
        mechanism = StoredMatrix(entries=weights.detach())
        note = f"it is {title}: {reason}, so its weights are stored as they are: {weights.nbytes:,} bytes"
        note = f"{note}, after dropout" if any(part.undropped is not None for part in trace.parts) else note
    elif isinstance(mechanism, ScoredMatrix) and isinstance(mechanism.mask, Given):
        note = f"it is {title}, whose mask is stored as a table: {mechanism.mask.given.nbytes:,} bytes"
    factors = RecurrenceFactors(
        replace(mechanism, title=title), values, context.detach().expand(b, h, n, e), sample_state(values), note=note
    )
    initial = sample_state(values[:, :, : t - n]) if 0 < n < t else None
    softmaxes = partial(read_softmaxes, trace, table, groups, kernel)
    return RecurrenceCall(kernel, initial, lambda: factors, must_continue=False, read_softmaxes=softmaxes)


def describe_kind(trace: Trace) -> str:
    """Return what attention with these weights is called."""
    choice = describe_choice(trace.changes)
    if choice:
        return f"{choice} attention"
    if len({id(part.form) for part in trace.parts}) > 1:
        return "differential attention" if {"sub", "subtract", "rsub"} & set(trace.changes) else "a sum of softmaxes"
    if trace.parts and any("mixes the heads" in one for one in trace.changes):
        return "talking heads"
    if trace.activated is not None:
        functions = trace.activated.functions
        name = ACTIVATION_NAMES.get(functions, " of ".join(reversed(functions)).lower())
        return f"{name} attention"
    return "attention whose weights are no softmax"


def solve_mixture(trace: Trace, table: AxisTable, groups: Groups, weights: Tensor, kernel: str) -> ScoredMatrix | None:
    """Return the matrix of softmaxes whose heads are mixed, added or subtracted; None if weights are not that.

    The factors are the solution of the equations of sampled rows, and are checked on others.
    """
    if not trace.parts:
        return None
    if any(part.form is None for part in trace.parts):
        raise UnreadableError("the heads of its scores are mixed before the softmax")
    calls = [resolve_part(part, table, groups, kernel) for part in trace.parts]
    matrix = read_scores(calls)
    rows, blocks = sample_rows(weights, matrix.q.shape[1]), choose_rows(trace, weights)
    eps = max(trace.eps, torch.finfo(weights.dtype).eps)
    x, y = (part.flatten(2).mT for part in (compute_activation(matrix, rows), weights.detach().double()[:, :, rows]))
    size = max(find_score_limit(matrix), 1.0) + matrix.q.shape[3]
    for has_constant in (False, True):
        inputs = torch.cat([x, torch.ones_like(x[..., :1])], -1) if has_constant else x
        solution = (torch.linalg.pinv(inputs) @ y).mT  # (b, h, n)
        solution = share_rows(round_factors(solution, eps), eps)
        mixing, constant = (solution[..., :-1], solution[..., -1]) if has_constant else (solution, None)
        candidate = replace(matrix, mixing=mixing.to(score_dtype(weights.dtype)), constant=constant)
        most = mixing.abs().sum(-1)[..., None, None] + (0 if constant is None else constant.abs()[..., None, None])
        for part in blocks:
            difference = (mix_rows(candidate, part) - weights.detach()[:, :, part].double()).abs()
            if not bool((difference <= 8 * eps * most * size).all()):
                break
        else:
            return candidate if constant is None else replace(candidate, constant=constant.to(score_dtype(weights.dtype)))
    raise UnreadableError(f"its formula differs from its weights by {float(difference.amax()):.2g}")


def resolve_part(part: Trace, table: AxisTable, groups: Groups, kernel: str) -> AttentionCall:
    """Return the call of a softmax among those that weights are made of, with heads of its own, as before these are mixed."""
    form = part.form or part.unmixed
    assert form is not None
    outside = set(table.expand_axes(groups.batch + groups.queries + groups.keys))
    own = [axis for axes in table.expand_dims(form.dims) for axis in axes if axis not in outside]
    return resolve_form(form, table, groups._replace(heads=tuple(own)), kernel, None)


def read_softmaxes(trace: Trace, table: AxisTable, groups: Groups, kernel: str) -> list[AttentionCall]:
    """Return the softmaxes over the keys whose heads were mixed to weights; none if one of them is not known."""
    if any(part.keys is None or set(table.expand_axes(part.keys)) != set(groups.keys) for part in trace.parts):
        return []
    try:
        return [resolve_part(part, table, groups, kernel) for part in trace.parts]
    except UnreadableError:
        return []


def mix_rows(matrix: ScoredMatrix, rows: Tensor) -> Tensor:
    """Compute the mixed softmaxes of some queries, (b, h, rows, k), in float64."""
    assert matrix.mixing is not None
    mixing = matrix.mixing.double().expand(len(matrix.q), -1, -1)
    mixture = torch.einsum("bhn,bnqk->bhqk", mixing, compute_activation(matrix, rows))
    return mixture if matrix.constant is None else mixture + matrix.constant[..., None, None]


def sample_rows(weights: Tensor, unknowns: int) -> Tensor:
    """Return rows with enough weights to solve for some unknowns, the last among them."""
    n, t = weights.shape[-2:]
    count = min(n, 2 + SPARE_EQUATIONS * (unknowns + 1) // max(t, 1))
    rows: Tensor = torch.linspace(n - 1, 0, count).long().unique()
    return rows.to(weights.device)


def round_factors(factors: Tensor, eps: float) -> Tensor:
    """Return factors of which those that are 0 or 1 up to rounding are so exactly."""
    tolerance = 64 * eps * factors.abs().amax().clamp(min=1)
    factors = factors.masked_fill(factors.abs() <= tolerance, 0)
    return factors.masked_fill((factors - 1).abs() <= tolerance, 1)


def share_rows(factors: Tensor, eps: float) -> Tensor:
    """Return the factors of one batch row if all have the same up to rounding, else those of each."""
    mean = factors.mean(0, keepdim=True)
    is_same = bool(((factors - mean).abs() <= 64 * eps * mean.abs().amax().clamp(min=1)).all())
    return mean if is_same else factors
