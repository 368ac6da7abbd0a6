"""The call behind handwritten weights that are no softmax: scores that are activated or decay, mixed softmaxes, or a matrix.

The formula comes from the operations that were followed. What they do not state, as the factor of a row or how heads are
mixed, is solved for from the model's own weights of the same forward, and the formula is compared with these. Where they
differ, or no formula is known, the weights themselves are stored.
"""

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from regard.map.implicit_map import Mechanism
from regard.map.linear_recurrence import LinearRecurrence
from regard.map.scored_matrix import IDENTITY, ScoredMatrix
from regard.map.stored_matrix import StoredMatrix
from regard.mechanism.heads import share
from regard.mechanism.masks import Given
from regard.mechanism.scores import score_dtype
from regard.observe.interception.attention_call import AttentionCall
from regard.observe.interception.handwritten.linear.activated_scores import (
    ACTIVATION_NAMES,
    choose_rows,
    compute_activation,
    find_score_limit,
    read_scores,
    sample_evenly,
    solve_activation,
)
from regard.observe.interception.handwritten.linear.decayed_scores import solve_decay
from regard.observe.interception.handwritten.linear.linear_attention import TITLE
from regard.observe.interception.handwritten.products.tensor_axes import AxisTable
from regard.observe.interception.handwritten.products.traces import Trace
from regard.observe.interception.handwritten.scores.axis_groups import Groups, describe_choice
from regard.observe.interception.handwritten.scores.score_formula import resolve_form
from regard.observe.interception.handwritten.scores.stored_weights import LIMIT_BYTES
from regard.observe.interception.handwritten.softmax.undivided_contexts import NEAR
from regard.observe.interception.plain_tensors import UnreadableError
from regard.observe.interception.recurrent.recurrence_call import RecurrenceCall, RecurrenceFactors, sample_state

SPARE_EQUATIONS = 8  # for each number that is solved for
UNKNOWN = "attention of activated scores"  # by a formula that no name stands for


@dataclass(eq=False)
class ActivatedCall:
    """A call of activated scores, and its output (b, h, q, e) as far as it was followed.

    columns are those of the values that the output has; row_scale is (b, h, q). divided is the matrix of the model
    without interventions, by the sums of whose rows the output may be divided. follows_sums says that it was divided by those
    of the changed weights instead.
    """

    call: RecurrenceCall
    factors: RecurrenceFactors
    divided: Mechanism
    outputs: Tensor
    columns: Tensor
    row_scale: Tensor
    follows_sums: bool = False
    note: str = ""  # beside that of its factors

    @classmethod
    def copy_call(cls, call: RecurrenceCall) -> "ActivatedCall":
        """Return a call with copies of its tensors, which the layer may write into before its output has been followed."""
        factors = call.read()
        mechanism = factors.copy_mechanism()
        outputs = factors.outputs.clone()
        return cls(
            call=call,
            factors=replace(factors, mechanism=mechanism, values=factors.values.clone()),
            divided=mechanism if call.unchanged is None else call.unchanged.read().copy_mechanism(),
            outputs=outputs,
            columns=torch.arange(outputs.shape[3], device=outputs.device),
            row_scale=outputs.new_ones(outputs.shape[:3], dtype=score_dtype(outputs.dtype)),
        )

    @property
    def kernel(self) -> str:
        """The functions that ran."""
        return self.call.kernel

    @property
    def v(self) -> Tensor:
        """The values (b, h, k, e)."""
        return self.factors.values

    def can_multiply(self, factor: Tensor) -> bool:
        """Return whether factors (b, h, q) are one number, or divide rows by the sums of their weights, plus a number or not.

        Those of a norm of each row are no part of the weights.
        """
        if not factor.numel() or bool((factor == factor.flatten()[0]).all()):
            return True
        mechanism = self.divided
        if isinstance(mechanism, StoredMatrix):
            rows = sample_evenly(mechanism.entries)
            sums = mechanism.entries[:, :, rows].double().sum(-1)
        elif isinstance(mechanism, LinearRecurrence):
            (b, h, t), rows = mechanism.shape, sample_evenly(self.row_scale.unsqueeze(-1))
            planes = (mechanism.build_plane(row, head) for row in range(b) for head in range(h))
            sums = torch.stack([plane.compute_rows(rows, 0, t).sum(-1) for plane in planes]).view(b, h, -1)
        else:
            assert isinstance(mechanism, ScoredMatrix)
            rows = sample_evenly(mechanism.q)
            sums = compute_activation(mechanism, rows).sum(-1)
            sums = sums if mechanism.row_scale is None else sums * mechanism.row_scale.expand_as(factor)[:, :, rows]
        scale = (factor * self.row_scale)[:, :, rows].double()
        added = 1 / scale - sums
        rounding = 64 * torch.finfo(factor.dtype).eps * (added.abs() + sums.abs()).amax()
        has_one_number_added = bool(((added - added.flatten()[0]).abs() <= rounding).all())
        return has_one_number_added or bool((((sums * scale - 1).abs() <= NEAR) | (sums == 0)).all())

    def divide_again(self, by: Tensor) -> None:
        """Multiply the rows by factors (b, h, q), so that they are divided by the sums of the changed weights."""
        self.row_scale, self.follows_sums = self.row_scale * by, True
        self.outputs = self.outputs * by.detach().unsqueeze(-1).to(self.outputs.dtype)

    def read(self) -> RecurrenceCall:
        """Return the call in terms of a recording, with the factors of its rows."""
        note = "; ".join(filter(None, (self.factors.note, self.note)))
        if bool((self.row_scale == 1).all()) and len(self.columns) == self.v.shape[3]:
            return replace(self.call, read=lambda: replace(self.factors, outputs=self.outputs, note=note))
        mechanism, values = self.factors.mechanism, self.v[..., self.columns]
        if isinstance(mechanism, StoredMatrix):
            entries = mechanism.entries * self.row_scale.unsqueeze(-1).to(mechanism.entries.dtype)
            mechanism = replace(mechanism, entries=entries)
        elif isinstance(mechanism, LinearRecurrence):
            mechanism = replace(mechanism, gate=self.row_scale if mechanism.gate is None else self.row_scale * mechanism.gate)
        else:
            assert isinstance(mechanism, ScoredMatrix)
            scale = self.row_scale if mechanism.row_scale is None else self.row_scale * mechanism.row_scale
            mechanism = replace(mechanism, row_scale=scale)
        state, (n, t) = sample_state(values), (self.outputs.shape[2], values.shape[2])
        factors = replace(self.factors, mechanism=mechanism, values=values, outputs=self.outputs, state=state, note=note)
        initial = sample_state(values[:, :, : t - n]) if 0 < n < t else None
        scale = self.row_scale.detach()
        return replace(self.call, initial_state=initial, read=lambda: factors, row_scale=scale, follows_sums=self.follows_sums)


def build_unnormalized_call(
    trace: Trace, table: AxisTable, groups: Groups, weights: Tensor, v: Tensor, context: Tensor, kernel: str, reason: str
) -> RecurrenceCall:
    """Return the call of which `weights` (b, h, q, k) are the weights and `context` (b, h, q, e) the output, from values v."""
    (b, h, n, t), e = weights.shape, v.shape[3]
    values = share(v.detach().expand(b, -1, -1, -1), h).contiguous()
    mechanism: ScoredMatrix | StoredMatrix | LinearRecurrence | None = None
    title, note = describe_kind(trace), ""
    for solve in (solve_decay, solve_activation, solve_mixture):
        try:
            mechanism = mechanism or solve(trace, table, groups, weights, kernel)
        except UnreadableError as error:
            reason = str(error)
            title = UNKNOWN if solve is solve_activation and title != TITLE else title
    is_larger = mechanism is not None and sum(x.nbytes for x in mechanism.tensors.values()) > weights.nbytes
    if mechanism is None or (is_larger and n < t):  # the few rows of a step are less than all of its keys
        if weights.nbytes > LIMIT_BYTES:
            raise UnreadableError(f"{reason}, and its weights as they are would take {weights.nbytes:,} bytes")
        mechanism = StoredMatrix(entries=weights.detach())
        note = f"it is {title}: {reason}, so its weights are stored as they are: {weights.nbytes:,} bytes"
        note = f"{note}, after dropout" if any(part.undropped is not None for part in trace.parts) else note
    elif isinstance(mechanism, ScoredMatrix) and isinstance(mechanism.mask, Given):
        note = f"it is {title}, whose mask is stored as a table: {mechanism.mask.given.nbytes:,} bytes"
    titled = mechanism if isinstance(mechanism, LinearRecurrence) else replace(mechanism, title=title)
    factors = RecurrenceFactors(titled, values, context.detach().expand(b, h, n, e), sample_state(values), note=note)
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
        return TITLE if name == IDENTITY else f"{name} attention"
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
