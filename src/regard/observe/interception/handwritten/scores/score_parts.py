"""What the steps of a formula of scores amount to: factors, and the mask and bias of what is added and hidden."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from regard.map.compressed_bias import compress_bias
from regard.mechanism.mask_algebra import EVERYTHING
from regard.mechanism.scores import score_dtype
from regard.observe.interception.forward_cache import infer_once
from regard.observe.interception.handwritten.scores.distance_terms import RelativeTerm
from regard.observe.interception.plain_tensors import UnreadableError
from regard.observe.stored_calls.mask_inference import infer_rule, infer_rule_with_bias

FILLED = -1e3  # a larger number that is filled in or added does not hide a key
ROUNDING = 4  # times the rounding of the largest entry, by which the shift of a row may differ from key to key
MASKED = -1e4  # what is not larger hides keys, as -1e9 does, and its rounding does not count
UNDERFLOW = 120.0  # below the largest score, a weight is 0 in float32


@dataclass
class ScoreParts:
    """What a form amounts to, on four axes: factors of scores, queries and keys, a softcap, what is added and hidden."""

    scale: float = 1.0
    query_factor: Tensor | None = None
    key_factor: Tensor | None = None
    softcap: float | None = None
    biases: list[Tensor] = field(default_factory=list)
    hidden: list[tuple[Tensor, float]] = field(default_factory=list)
    places: list[int] = field(default_factory=list)  # of what was hidden: the number of biases that were added before
    sinks: Tensor | None = None
    more: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # queries and keys of further products
    terms: list[RelativeTerm] = field(default_factory=list)  # of relative positions
    raw: list[Tensor] = field(default_factory=list)  # tensors that biases and masks were made from
    factors: list[float] = field(default_factory=list)  # numbers that biases and masks were multiplied with
    shift: float | Tensor = 0.0  # what is added to whole rows, which no softmax sees


def infer_rule_of_parts(parts: ScoreParts, q: Tensor, k: Tensor) -> tuple[Any, Any, Tensor | None]:
    """Return the mask, offset and bias of what is added to the scores and hidden from them."""
    if not parts.biases and not parts.hidden:
        return EVERYTHING, 0, None
    amounts = [amount for _, amount in parts.hidden]
    bottom = torch.finfo(score_dtype(q.dtype)).min / 2  # hides a key beside any scores

    def start_rules() -> tuple[bool, dict[float, Any]]:
        return may_depend_on_scores(parts, bottom), {}

    how = "by hand", *amounts, *parts.places, "times", *parts.factors
    depends, rules = infer_once(tuple(parts.raw), q, k, start_rules, *how)
    reach = 10.0 ** math.ceil(math.log10(2 * bound_scores(parts, q, k) + UNDERFLOW)) if depends else 0.0  # layers share it
    if reach not in rules:
        shallow = [amount for amount in amounts if amount > -reach]
        if shallow:
            raise UnreadableError(
                f"it fills scores with {shallow[0]:g}, which does not hide a key beside scores up to {reach / 2:g}"
            )
        with torch.no_grad():
            rules[reach] = join_rules(parts, min(FILLED, -reach), q, k)
    found: tuple[Any, Any, Tensor | None] = rules[reach]
    return found


def may_depend_on_scores(parts: ScoreParts, bottom: float) -> bool:
    """Return whether the size of the scores may decide which keys are hidden by what is added and filled in.

    It does not for numbers of at most `bottom`, nor for added ones that are larger than any that hides.
    """
    if any(amount > bottom for _, amount in parts.hidden):
        return True
    return any(bool(((bias <= FILLED) & (bias > bottom)).any()) for bias in parts.biases)


def join_rules(parts: ScoreParts, low: float, q: Tensor, k: Tensor) -> Any:
    """Return the mask, offset and bias of all that is added and hidden; what is added hides a key if it is at most `low`.

    A row of which every key would be hidden keeps what is added as a bias, since its softmax is of the shifted scores.
    """
    bias: Tensor | None = None
    added: Tensor | None = None  # what hides keys, as the scores have it in the end
    for n in range(len(parts.biases) + 1):
        for (table, amount), place in zip(parts.hidden, parts.places, strict=True):
            if place == n:  # it takes the place of what was added before
                before = torch.zeros((), dtype=score_dtype(q.dtype), device=table.device) if added is None else added
                added = torch.where(table, amount, before)
        if n == len(parts.biases):
            break
        x = parts.biases[n]
        below = x <= low
        if below.any() and not below.all(-1).any():
            hides = x.to(score_dtype(q.dtype)).where(below, 0)
            added = hides if added is None else added + hides
            x = x.masked_fill(below, 0)
        if x.any():
            bias = x if bias is None else bias + x
    mask = None if added is None else build_additive_mask(added, added <= low)
    if bias is None:
        return (EVERYTHING, 0, None) if mask is None else infer_rule(mask, q, k)
    bias = bias.to(score_dtype(bias.dtype))
    hidden = None if added is None else added <= low
    bias = reduce_to_keys(bias, hidden, score_dtype(q.dtype)).clone()
    return infer_rule_with_bias(mask, False, compress_bias(bias, hidden), q, k)


def bound_scores(parts: ScoreParts, q: Tensor, k: Tensor) -> float:
    """Return a bound of the size of the scores before they are shifted; 0 if queries or keys are not finite."""
    bound = abs(parts.softcap) if parts.softcap is not None else bound_products(q, k, parts.scale)
    return bound if math.isfinite(bound) else 0.0


def bound_products(q: Tensor, k: Tensor, scale: float) -> float:
    """Return the product of the largest norms of a query and of a key, times the size of a scale; 0 if there are none."""
    if not q.numel() or not k.numel():
        return 0.0
    q, k = (x.detach().to(score_dtype(x.dtype)) for x in (q, k))
    squares = [float((x * x).sum(-1).amax()) for x in (q, k)]  # norm() is slow where the features are not side by side
    if not all(map(math.isfinite, squares)):  # also of finite numbers, if these are large
        squares = [float((x.double() * x).sum(-1).amax()) for x in (q, k)]
    return math.sqrt(squares[0]) * math.sqrt(squares[1]) * abs(scale)


def build_additive_mask(added: Tensor, hidden: Tensor) -> Tensor:
    """Return -inf where a table hides, and the smallest number on the keys of a blind row from which least was taken.

    These keys have equal weights, since what is added swallows their scores, unless it is -inf.
    """
    blind, most = hidden.all(-1, keepdim=True), added.amax(-1, keepdim=True)
    mask = torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, -math.inf)
    return mask.masked_fill_(blind & (added == most) & (most != -math.inf), torch.finfo(torch.float32).min)


def reduce_to_keys(bias: Tensor, hidden: Tensor | None, kind: torch.dtype) -> Tensor:
    """Return a bias (..., q, k) that is the same for all queries up to a shift of each row as (..., 1, k), else as it is.

    Its entries of hidden keys do not count. The shifts may be rounded as numbers of `kind`, the dtype of the scores, are, as
    those of decays that are added up over tokens.
    """
    if bias.shape[-2] == 1 or not bool(bias.isfinite().all()):
        return bias
    last, eps = bias[..., -1:, :], torch.finfo(kind).eps
    tolerance = ROUNDING * eps * float(bias.masked_fill(bias <= MASKED, 0).abs().amax())
    for rows in (slice(-2, None), slice(None)):  # a few rows are quick, and tell most
        rest = bias[..., rows, :] - last
        if hidden is None:
            difference = rest - rest[..., :1]
        else:
            rest, table = torch.broadcast_tensors(rest, hidden if hidden.shape[-2] == 1 else hidden[..., rows, :])
            first = table.long().argmin(-1, keepdim=True)  # of the keys that are not hidden
            difference = torch.where(table, 0, rest - rest.gather(-1, first))
        if float(difference.abs().amax()) > tolerance:
            return bias
    return last
