"""Scores that are multiplied by a decay from each key to its query, as in retention: a linear recurrence of O(T) numbers.

The parallel form of RetNet and the quadratic form of Mamba-2 multiply scores by a table D_ij = r_i exp(L_i - L_j) for j ≤ i,
and by 0 for later keys. Of the table r and L are kept, if every entry follows from them up to rounding.
"""

import functools
import operator
from dataclasses import replace

import torch
from torch import Tensor

from regard.map.linear_recurrence import LinearRecurrence
from regard.map.scored_matrix import IDENTITY
from regard.mechanism.mask_algebra import EVERYTHING
from regard.mechanism.scores import score_dtype
from regard.observe.interception.handwritten.linear.activated_scores import (
    choose_rows,
    compute_activation,
    find_score_limit,
    read_scores,
)
from regard.observe.interception.handwritten.linear.linear_scores import is_table
from regard.observe.interception.handwritten.products.score_form import ScoreStep, StepKind
from regard.observe.interception.handwritten.products.tensor_axes import AxisTable
from regard.observe.interception.handwritten.products.traces import Trace
from regard.observe.interception.handwritten.scores.axis_groups import Groups
from regard.observe.interception.handwritten.scores.score_formula import resolve_form
from regard.observe.interception.plain_tensors import UnreadableError

SMALLEST = 1e-12  # what is left of a key, from which the decay of later tokens is read; then from a later key
TABLE_ROUNDINGS = 16  # of the entries of a table, relative to its largest exponent
KEYS = 128  # that are compared at a time
MOST = 1e6  # exp(L_n - L_j) that is multiplied with what is left of key n, which must not be too small a number


def solve_decay(trace: Trace, table: AxisTable, groups: Groups, weights: Tensor, kernel: str) -> LinearRecurrence | None:
    """Return the recurrence of scores times a decay and a factor of each row; None if weights (b, h, q, k) are not that.

    Queries and keys are the same tokens. It is compared with the weights of sampled rows, or of all if there are few.
    Raises UnreadableError if it differs.
    """
    form, n = trace.form, weights.shape[2]
    if form is None or trace.activated is None or trace.activated.functions != (IDENTITY,) or weights.shape[3] != n:
        return None
    steps = [step for step in form.steps if is_table(step)]
    if all(map(is_fill, steps)) or any(step.amount for step in steps if is_fill(step)):
        return None
    eps, kind = max(trace.eps, torch.finfo(weights.dtype).eps), score_dtype(weights.dtype)
    found = read_decay([arrange_table(step, table, groups, kind) for step in steps], eps)
    if found is None:
        return None
    call = resolve_form(trace.activated.form, table, groups, kernel, None)
    if call.sinks is not None or call.mask != EVERYTHING or not (call.bias is None is call.softcap):
        return None
    (logs, gate), matrix = found, replace(read_scores([call]), activation=IDENTITY)
    size = find_score_limit(matrix) * matrix.q.shape[3] * float(gate.abs().amax())
    for rows in choose_rows(trace, weights):
        difference = (compute_activation(matrix, rows) * expand_decay(logs, gate, rows)).sub_(weights[:, :, rows]).abs_()
        if not float(difference.amax()) <= 4 * eps * size:
            raise UnreadableError(f"its formula with decays differs from its weights by {float(difference.amax()):.2g}")
    is_one = bool(((gate - 1).abs() <= TABLE_ROUNDINGS * eps).all())
    decay = torch.nn.functional.pad(logs.diff(), (1, 0)).clamp_(max=0).unsqueeze(-1).to(kind)
    return LinearRecurrence(decay=decay, q=matrix.q * matrix.scale, k=matrix.k, gate=None if is_one else gate.to(kind))


def is_fill(step: ScoreStep) -> bool:
    """Return whether a step fills in a number where a table is True."""
    return step.kind is StepKind.FILL


def arrange_table(step: ScoreStep, table: AxisTable, groups: Groups, kind: torch.dtype) -> Tensor:
    """Return what a step multiplies each score by, (b or 1, h or 1, q, k)."""
    assert isinstance(step.operand, Tensor)
    x = table.arrange(step.operand.detach(), step.dims, groups.matrix)
    return (~x.bool() if is_fill(step) else x).to(kind)


def read_decay(tables: list[Tensor], eps: float) -> tuple[Tensor, Tensor] | None:
    """Return L and r, (b or 1, h or 1, t) each, of a product of tables r_i exp(L_i - L_j), 0 for j > i; None if it is none.

    L does not grow, and falls somewhere: a table of 0 and 1 is a mask. eps is the rounding of the tables.
    """
    product = functools.reduce(operator.mul, tables)
    gate = product.diagonal(dim1=-2, dim2=-1).double()
    if bool((gate == 0).any()):
        return None
    found = [read_logs(x, of_rows) for x, of_rows in zip(product.flatten(0, 1), gate.flatten(0, 1), strict=True)]
    known = [one for one in found if one is not None]
    if len(known) < len(found):
        return None
    logs = torch.stack(known).view(gate.shape)
    rounding = TABLE_ROUNDINGS * eps * (1 + float(logs.abs().amax()))
    if not bool((logs.diff() <= rounding).all()) or not bool((logs < -rounding).any()):
        return None
    return (logs, gate) if is_decay(product, logs, gate, rounding) else None


def is_decay(table: Tensor, logs: Tensor, gate: Tensor, rounding: float) -> bool:
    """Return whether a table has the entries r_i exp(L_i - L_j) up to a relative rounding, and 0 for later keys.

    A block of keys at a time these are r_i exp(L_i - L_n) times exp(L_n - L_j), of its first key n, unless that is too large.
    """
    smallest, t = torch.finfo(table.dtype).tiny * MOST, table.shape[-1]
    if table.triu(1).any():
        return False
    for n in range(0, t, KEYS):
        first, own = logs[..., n : n + 1], logs[..., n : n + KEYS]
        left, spread = gate[..., n:] * (logs[..., n:] - first).exp(), (first - own).exp()
        if float(spread.amax()) <= MOST:
            expected = (left.to(table.dtype).unsqueeze(-1) * spread.to(table.dtype).unsqueeze(-2)).tril_()
        else:
            expected = expand_decay(logs, gate, torch.arange(n, t, device=table.device))[..., n : n + KEYS]
        difference = (expected - table[..., n:, n : n + KEYS]).abs_()
        if not bool((difference <= expected.abs_().mul_(rounding).add_(smallest)).all()):  # nor if it is NaN
            return False
    return True


def read_logs(table: Tensor, gate: Tensor) -> Tensor | None:
    """Return L (t,), with L_0 = 0, of a table (t, t) of gate_i exp(L_i - L_j) for j < i; None if it has not these signs.

    It is read from the first key as long as enough is left of it, then from the key that was reached, so that it is as exact as
    a few of the entries, not as the product of all.
    """
    logs, first = gate.new_zeros(len(gate)), 0
    while first < len(gate) - 1:
        column = table[first + 1 :, first] / gate[first + 1 :]
        is_left = column >= SMALLEST
        count = len(column) if bool(is_left.all()) else max(1, int(is_left.int().argmin()))
        if not column[0] > 0:
            return None
        logs[first + 1 : first + 1 + count] = logs[first] + column[:count].log()
        first += count
    return logs


def expand_decay(logs: Tensor, gate: Tensor, rows: Tensor) -> Tensor:
    """Compute r_i exp(L_i - L_j) of some queries i, by index (n,), for all keys j ≤ i, and 0 for later ones."""
    is_later = torch.arange(logs.shape[-1], device=logs.device) > rows.unsqueeze(-1)
    exponents = (logs[..., rows].unsqueeze(-1) - logs.unsqueeze(-2)).masked_fill_(is_later, -torch.inf)
    return exponents.exp_().mul_(gate[..., rows].unsqueeze(-1))
