"""Weights that are an activation of scores times a factor of each row, compared with the model's own weights."""

from dataclasses import replace

import torch
from torch import Tensor

from regard.map.plane import BLOCK_NUMBERS
from regard.map.scored_matrix import SOFTMAX, ScoredMatrix, activate_scores
from regard.mechanism.heads import share
from regard.mechanism.masks import Causal, Given
from regard.mechanism.request import autocast_tensor, is_autocast_on
from regard.mechanism.scores import score_dtype
from regard.observe.interception.attention_call import AttentionCall
from regard.observe.interception.handwritten.products.tensor_axes import AxisTable
from regard.observe.interception.handwritten.products.traces import Trace
from regard.observe.interception.handwritten.scores.axis_groups import Groups
from regard.observe.interception.handwritten.scores.score_formula import collect_parts, resolve_form
from regard.observe.interception.handwritten.scores.score_parts import bound_products
from regard.observe.interception.plain_tensors import UnreadableError

CHECKED_ROWS = 32  # of each matrix, on which a formula is compared with the model's own weights
ACTIVATION_NAMES: dict[tuple[str, ...], str] = {  # by the functions of torch and modules, in order
    **{(one,): "relu" for one in ("relu", "ReLU", "clamp", "clamp_min", "maximum", "clip")},
    **{(one, other): "squared relu" for one in ("relu", "ReLU", "clamp", "clamp_min") for other in ("square", "pow")},
    **{(one,): "sigmoid" for one in ("sigmoid", "Sigmoid", "special_expit")},
    **{(one,): "square" for one in ("square", "pow")},
    **{(one,): "silu" for one in ("silu", "SiLU")},
    **{(one,): "gelu" for one in ("gelu", "GELU")},
}
QUADRATIC = ("squared relu", "square")


def solve_activation(trace: Trace, table: AxisTable, groups: Groups, model_weights: Tensor, kernel: str) -> ScoredMatrix | None:
    """Return the matrix of an activation of scores times a factor of each row; None if weights are not that.

    It is compared with the weights of sampled rows, or of all if there are few.
    """
    if trace.activated is None or trace.activated.functions not in ACTIVATION_NAMES:
        return None
    form, functions = trace.activated
    call = resolve_form(form, table, groups, kernel, None)
    shift = collect_parts(form, table, groups)[2].shift
    if call.sinks is not None or not isinstance(shift, float):
        return None
    eps = max(trace.eps, torch.finfo(model_weights.dtype).eps)
    matrix = replace(read_scores([call]), activation=ACTIVATION_NAMES[functions], shift=shift)
    rows = sample_evenly(model_weights)
    matrix = hide_keys(matrix, model_weights, rows, eps)
    factor = find_row_factors(matrix, model_weights, rows)
    if bool(((factor - factor.mean()).abs() <= 64 * eps * factor.abs().amax()).all()):
        factor = factor.mean().view(1, 1, 1)
    else:
        factor = torch.cat([find_row_factors(matrix, model_weights, part) for part in split_rows(model_weights)], -1)
    size = find_score_limit(matrix)
    slope = 2 * size if matrix.activation in QUADRATIC else 1.2  # of the activation, at most
    kind = score_dtype(model_weights.dtype)
    for part in choose_rows(trace, model_weights):
        own = (factor if factor.shape[-1] == 1 else factor[..., part]).unsqueeze(-1).to(kind)
        exact = model_weights[:, :, part].to(kind)
        difference = (compute_activation(matrix, part, kind) * own).sub_(exact).abs_()
        tolerance = own.abs() * (slope * size * matrix.q.shape[3])
        if float(difference.amax()) <= 4 * eps * float(tolerance.amin()):
            continue  # the common case, with few operations
        if not bool((difference <= 4 * eps * (exact.abs() + tolerance)).all()):
            raise UnreadableError(f"its formula differs from its weights by {float(difference.amax()):.2g}")
    is_one = factor.numel() == 1 and abs(float(factor) - 1) < 64 * eps
    return matrix if is_one else replace(matrix, row_scale=factor.to(score_dtype(model_weights.dtype)))


def choose_rows(trace: Trace, weights: Tensor) -> list[Tensor]:
    """Return the indices of the rows that a formula is compared on, in blocks: after a sample, all if some may be edited."""
    has_edits = trace.has_edits or any(part.has_edits for part in trace.parts)
    return [sample_evenly(weights), *(split_rows(weights) if has_edits and weights.shape[2] > CHECKED_ROWS else ())]


def sample_evenly(weights: Tensor) -> Tensor:
    """Return the indices of rows of weights (b, h, q, k), evenly over all."""
    n = weights.shape[2]
    return torch.linspace(0, n - 1, min(n, CHECKED_ROWS), device=weights.device).long()


def split_rows(weights: Tensor) -> list[Tensor]:
    """Return the indices of all rows of weights (b, h, q, k), in blocks."""
    size = max(1, BLOCK_NUMBERS * weights.shape[2] // max(weights.numel(), 1))
    return list(torch.arange(weights.shape[2], device=weights.device).split(size))


def find_row_factors(matrix: ScoredMatrix, weights: Tensor, rows: Tensor) -> Tensor:
    """Return what the activations of some rows were multiplied by to give weights, (b, h, rows), in float64."""
    activations, exact = compute_activation(matrix, rows), weights[:, :, rows].double()
    factor = (exact * activations).sum(-1) / activations.square().sum(-1)
    return factor.where(activations.any(-1), factor.nanmean() if activations.any() else 1.0)


def hide_keys(matrix: ScoredMatrix, weights: Tensor, rows: Tensor, eps: float) -> ScoredMatrix:
    """Return a matrix whose mask also hides keys of which weights (b, h, q, k) are 0 and activations are not.

    The mask is causal if that explains the sampled rows, else a table.
    """

    def find_hidden(block: Tensor) -> Tensor:
        activations = compute_activation(matrix, block).abs()
        return (weights[:, :, block] == 0) & (activations > eps * activations.amax((-2, -1), keepdim=True))

    is_hidden = find_hidden(rows)
    if not is_hidden.any():
        return matrix
    n, keys = weights.shape[2], torch.arange(weights.shape[3], device=weights.device)
    is_earlier = keys <= rows.unsqueeze(-1) + len(keys) - n
    is_visible = matrix.mask.block(torch.arange(n, device=weights.device), keys, matrix.offset)
    if (
        bool(is_visible.all())
        and not bool((is_hidden & is_earlier).any())
        and not bool(weights[:, :, rows][..., ~is_earlier].any())
    ):
        return replace(matrix, mask=Causal(), offset=len(keys) - n)
    is_hidden_anywhere = torch.cat([find_hidden(part) for part in split_rows(weights)], 2)
    return replace(matrix, mask=Given.from_shared_table(is_visible & ~is_hidden_anywhere), offset=0)


def read_scores(calls: list[AttentionCall]) -> ScoredMatrix:
    """Return the matrix of the softmax of one call, or of all heads of several. Raises UnreadableError if they differ."""
    first_call = calls[0]
    if any(one.sinks is not None for one in calls):
        raise UnreadableError("a softmax among its weights has a sink")
    kinds = {(one.softcap, one.offset if isinstance(one.offset, int) else id(one.offset)) for one in calls}
    if len(kinds) > 1 or any(one.mask != first_call.mask for one in calls) or len({one.q.shape[3] for one in calls}) > 1:
        raise UnreadableError("the softmaxes among its weights have different masks or widths")
    scale = 1.0 if first_call.scale is None else first_call.scale
    heads = [one.q.shape[1] for one in calls]
    q = [
        one.q.detach() * ((1.0 if one.scale is None else one.scale) / scale) if one is not first_call else one.q
        for one in calls
    ]
    k = [one.k.detach() if len(calls) == 1 else share(one.k.detach(), n) for one, n in zip(calls, heads, strict=True)]
    if is_autocast_on(q[0].device):
        q, k = [autocast_tensor(x) for x in q], [autocast_tensor(x) for x in k]
    return ScoredMatrix(
        q=torch.cat(q, 1).detach(),
        k=torch.cat(k, 1),
        activation=SOFTMAX,
        mask=first_call.mask,
        offset=first_call.offset,
        scale=scale,
        softcap=first_call.softcap,
        bias=join_biases([one.bias for one in calls], heads),
    )


def join_biases(biases: list[Tensor | None], heads: list[int]) -> Tensor | None:
    """Return the biases of several calls, joined along the heads; None if there are none. Raises UnreadableError."""
    present = [x for x in biases if x is not None]
    if len(biases) == 1 or not present:
        return biases[0]
    if len(present) < len(biases) or len({(len(x), x.shape[2]) for x in present}) > 1:
        raise UnreadableError("the softmaxes among its weights have different biases")
    return torch.cat([x.expand(-1, n, -1, -1) for x, n in zip(present, heads, strict=True)], 1)


def find_score_limit(matrix: ScoredMatrix) -> float:
    """Return a bound of the size of the scores of a matrix."""
    bias = 0.0 if matrix.bias is None else float(matrix.bias.masked_fill(matrix.bias.isinf(), 0).abs().amax())
    return bound_products(matrix.q, matrix.k, matrix.scale) + bias + abs(matrix.shift)


def compute_activation(matrix: ScoredMatrix, rows: Tensor | slice, kind: torch.dtype = torch.float64) -> Tensor:
    """Compute the activation of the scores of some queries, (b, n, rows, k), in a dtype."""
    queries = torch.arange(matrix.rows, device=matrix.q.device)[rows]
    keys = torch.arange(matrix.shape[2], device=queries.device)
    raw = matrix.q[:, :, rows].to(kind) @ share(matrix.k.to(kind), matrix.q.shape[1]).mT
    bias = matrix.bias if matrix.bias is None or matrix.bias.shape[2] == 1 else matrix.bias[:, :, rows]
    return activate_scores(raw, matrix, bias, matrix.mask.block(queries, keys, matrix.offset))
