"""How far apart two correct computations of one number may lie: from the dtype, the number of terms and their magnitude.

Every numerical test takes its tolerance from here or compares in float64; none is fitted to what one processor printed. What
differs between processors does not appear in the bound: the length of a register, the order of a sum, the number of threads,
whether a product and a sum are one instruction.

Rounding. Each operation returns its exact result times (1 + δ) with |δ| ≤ u, where u is half the distance from 1 to the next
number. A sum of n products is then off by at most γ(n) Σ|aᵢ||bᵢ| in any order of summation, fused or not, with

    γ(n) = n u / (1 - n u)                     always: N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed.,
                                               SIAM 2002, section 3.1
    γ(n) = exp(λ √n u + n u² / (1 - u)) - 1    with a probability that grows with λ, where the δ are independent and of mean 0:
                                               N. J. Higham and T. Mary, A new approach to probabilistic rounding error
                                               analysis, SIAM J. Sci. Comput. 41 (5), 2019, theorem 2.4

`gamma` is the smaller of the two, with λ = 4; in the experiments of that paper λ = 1 holds throughout. Sums of many equal
numbers break the second model (their δ are alike): `gamma(..., alike=True)` is the first alone.

Softmax. A score scale q·k is off by e ≤ γ(d + 4) scale Σ|q||k|: d products, their scaling, and the subtraction of the maximum,
which is no larger than the mean of the scores under the weights plus log k, so that the mean of e and γ(k) cover its rounding.
To first order log w changes by e plus the mean of e under the weights, and by the k + EXPONENTIAL operations of the sum, the
exponential and the division. A linear function Σ c w of weights is off by Σ |c| times the error of each weight, and by
γ(k) Σ |c| w; the context is one, with c = v. A softcap does not enlarge an error, its slope is at most 1. torch's own
attention on a CPU has faster exponentials, whose error (TORCH_EXPONENTIAL) adds to e.

Two computed values lie at most two such errors apart: every bound has that factor 2. Where one of the two was computed in
float64 it is room for that one's own error.

Whole models have no such formula that is not absurdly large. They are compared in float64; where the code under test computes
in float32 alone, `estimate_rounding` measures, in float64, how far the outputs move if each weight moves by γ, signs drawn:
rounding in a linear layer amounts to a change of its weights by no more than that (Higham, section 3.5). It is an estimate,
twice the largest of DRAWS, and no bound.
"""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

LAMBDA = 4.0
EXPONENTIAL = 8  # operations that an exponential and a division count as; 2e-7 of the compiled exponential is 3.4 u
TORCH_EXPONENTIAL = {  # relative errors of scaled_dot_product_attention's on a CPU
    torch.float32: 20 * torch.finfo(torch.float32).eps,  # exp_u20: 20 units in the last place, as its source says
    torch.bfloat16: 1.2e-4,  # fexp_u20, a cubic polynomial (Malossi et al. 2015, Fast exponential computation on SIMD)
    torch.float16: 1.2e-4,
}
SMALLEST = 2.0**-124  # weights below some exp(-87) may be 0 in float32
DRAWS = 5  # random perturbations of a model's weights


def unit_roundoff(dtype: torch.dtype) -> float:
    """u = eps / 2: 6.0e-8 in float32, 3.9e-3 in bfloat16, 4.9e-4 in float16, 1.1e-16 in float64."""
    return torch.finfo(dtype).eps / 2


def gamma(dtype: torch.dtype, terms: float, *, alike: bool = False) -> float:
    """γ(terms): the relative error of a sum of so many products of positive numbers; alike: of the same number many times."""
    u = unit_roundoff(dtype)
    assert terms * u < 0.5, f"{terms} operations in {dtype} leave no digit: compute the expected value in a wider dtype"
    always = terms * u / (1 - terms * u)
    return always if alike else min(always, math.expm1(LAMBDA * math.sqrt(terms) * u + terms * u**2 / (1 - u)))


def sum_bound(dtype: torch.dtype, terms: float, magnitude: float = 1.0, *, alike: bool = False) -> float:
    """2 γ(terms) magnitude: of two sums whose terms have absolute values that add up to at most `magnitude`.

    A value reached through n operations one after the other, without cancellation, is the same with terms = n and its own size.
    """
    return 2 * gamma(dtype, terms, alike=alike) * magnitude


@dataclass(frozen=True)
class AttentionBounds:
    """How far apart two computations of the same attention may lie, in each place."""

    scores: Tensor  # (b, h, q, k), scaled
    weights: Tensor  # (b, h, q, k)
    context: Tensor  # (b, h, q, e)

    def functional(self, coefficients: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
        """Of Σ c w over the keys, for coefficients c that broadcast to (b, h, q, k) and the exact weights; (b, h, q)."""
        size = coefficients.double().abs()
        return (self.weights * size).sum(-1) + 2 * gamma(dtype, weights.shape[-1]) * (weights.double() * size).sum(-1)


def attention_bounds(
    dtype: torch.dtype,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: Tensor,
    *,
    scale: float | None = None,
    bias: Tensor | None = None,
    exponential: float = 0.0,
) -> AttentionBounds:
    """The bounds of attention whose scores and softmax are computed in this dtype, for q, k, v as the kernel sees them.

    q (b, h, q, d); k (b, g, k, d); v (b, g, k, e); weights (b, h, q, k): the exact ones, in float64. exponential: the relative
    error of an exponential that is off by more than a few roundings. A kernel of bfloat16 has float32 here; what it rounds to
    bfloat16 adds `half_bound`.
    """
    heads, width = q.shape[1], k.shape[3]
    q, k, v = q.double().abs(), *(x.double().abs().repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    factor = 1 / math.sqrt(width) if scale is None else abs(scale)
    scores = gamma(dtype, width + 4) * factor * (q @ k.mT)
    if bias is not None:
        scores = scores + gamma(dtype, 2) * bias.double().abs().nan_to_num(posinf=0)
    return bounds_from_scores(dtype, scores + exponential, weights, v)


def bounds_from_scores(dtype: torch.dtype, e: Tensor, weights: Tensor, v: Tensor) -> AttentionBounds:
    """`attention_bounds` of scores that are off by at most e (b, h, q, k) as the softmax takes them."""
    exact = weights.double()
    relative = torch.expm1(e + (exact * e).sum(-1, keepdim=True)) + gamma(dtype, exact.shape[-1] + EXPONENTIAL)
    off = exact * relative + SMALLEST
    context = off @ v.double().abs() + gamma(dtype, max(exact.shape[-1], 1)) * (exact @ v.double().abs())
    return AttentionBounds(2 * e, 2 * off, 2 * context)


def estimate_rounding(
    model: nn.Module, run: Callable[[nn.Module], Tensor], terms: int, dtype: torch.dtype = torch.float32
) -> float:
    """How far run(model) moves if every parameter is multiplied by 1 ± γ(terms), signs random: the largest of DRAWS, twice.

    model: in float64. terms: of its widest sum. dtype: of the computation that is to be bounded.
    """
    exact = run(model)
    return 2 * max(float((run(other) - exact).abs().max()) for other in perturb_models(model, gamma(dtype, terms)))


def perturb_models(model: nn.Module, step: float) -> Iterator[nn.Module]:
    """One copy of a model in float64, DRAWS times, every parameter multiplied by 1 ± step, signs random; the same each time."""
    assert next(model.parameters()).dtype == torch.float64, "expected a model in float64: call model.double() first"
    generator = torch.Generator().manual_seed(0)
    other = copy.deepcopy(model)  # once: of a small model this takes longer than a run
    for _ in range(DRAWS):
        with torch.no_grad():
            for parameter, exact in zip(other.parameters(), model.parameters(), strict=True):
                signs = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
                parameter.copy_(exact * (1 + step * signs))
        yield other


def assert_within(found: Tensor, expected: Tensor, allowed: float | Tensor, message: str = "") -> None:
    """Fail unless |found - expected| ≤ allowed in each place, compared in float64; NaN equals NaN, inf equals inf."""
    found, expected = torch.as_tensor(found).double(), torch.as_tensor(expected).double()
    assert found.shape == expected.shape, f"{message}: {tuple(found.shape)} where {tuple(expected.shape)} is expected"
    same = (found == expected) | (found.isnan() & expected.isnan())
    distance = (found - expected).abs()
    wrong = ~(same | (distance <= torch.as_tensor(allowed, dtype=torch.float64)))
    if wrong.any():
        place = tuple(wrong.nonzero()[0].tolist())
        limit = torch.as_tensor(allowed, dtype=torch.float64).expand(found.shape)
        raise AssertionError(
            f"{message or 'values'}: {int(wrong.sum())} of {wrong.numel()} are further apart than their bound; at {place} "
            f"{float(found[place])!r} where {float(expected[place])!r} is expected, {float(distance[place]):.3g} apart, "
            f"allowed {float(limit[place]):.3g}"
        )


def cross_entropy_bounds(
    dtype: torch.dtype, logits: Tensor, targets: Tensor, *, terms: int, smoothing: float = 0.0
) -> tuple[float, Tensor]:
    """Of -Σ log softmax(x)[target] over the rows that have one (those of others are below 0), and of its gradient (m, n).

    The logarithm of a row's sum is off by a = γ(n) + γ(4) (max|x| + |lse|): the sum, and the differences beside it; and by
    8 u of the exponential, which may have one sign in all rows. The a of many rows are independent and add up as the root of
    their squares. terms: of the last sum, over the rows (1 where it is taken in float64). The gradient softmax - target is off
    by a + 8 u + u |x - lse| of each weight. With smoothing, the mean of a row is one more sum of n.
    """
    x, rows = logits.detach().double(), targets >= 0
    lse, size, n = x.logsumexp(-1), x.abs().amax(-1), x.shape[-1]
    row = gamma(dtype, n) * (1 + smoothing * size) + gamma(dtype, 4) * (size + lse.abs())
    exact = torch.nn.functional.cross_entropy(x, targets.clamp(min=0), reduction="none", label_smoothing=smoothing)
    exponential = gamma(dtype, EXPONENTIAL)
    loss = row[rows].square().sum().sqrt() + exponential * rows.sum() + gamma(dtype, terms) * exact[rows].sum()
    weights, one = (x - lse[:, None]).exp(), torch.zeros_like(x).scatter_(1, targets.clamp(min=0)[:, None], 1.0)
    relative = torch.expm1(row[:, None] + gamma(dtype, 1) * (x - lse[:, None]).abs()) + gamma(dtype, EXPONENTIAL + 3)
    slope = (weights * relative + SMALLEST + gamma(dtype, 4) * (one + smoothing / n)) * rows[:, None]
    return 2 * float(loss), 2 * slope


def is_stable_under_rounding(
    model: nn.Module, choose: Callable[[nn.Module], object], terms: int, dtype: torch.dtype = torch.float32
) -> bool:
    """Return whether choose(model), tokens say, is the same for DRAWS models with parameters times 1 ± 2 γ(terms).

    All in float64, signs random. Where it is, equal tokens are asked of two computations in `dtype`: none was near a tie.
    """
    expected = choose(model)
    return all(choose(other) == expected for other in perturb_models(model, 2 * gamma(dtype, terms)))


def softmax_bound(dtype: torch.dtype, scores: Tensor, roundings: float = 1) -> Tensor:
    """Of softmax(scores) over the last axis in this dtype, for exact scores that are rounded to it so many times before.

    e ≤ γ(roundings) |s| + u |s - max|, at most γ(roundings + 1) (|s| + max |s|); then as in `attention_bounds`.
    """
    exact = scores.double().softmax(-1).nan_to_num()
    size = scores.double().abs().where(exact > 0, 0)
    e = gamma(dtype, roundings + 1) * (size + size.amax(-1, keepdim=True))
    return bounds_from_scores(dtype, e, exact, e.new_zeros(scores.shape[-1], 0)).weights


def propagate_errors(dtype: torch.dtype, errors: Tensor, v: Tensor, weights: Tensor) -> AttentionBounds:
    """The bounds of weights and context whose scores are off by at most these errors (b, h, q, k), each of two computations.

    Tighter than `attention_bounds` where one key has nearly all the weight, since an error that all keys share has no effect:
    exponentials that are off by rⱼ ≤ exp(eⱼ) - 1 + γ(EXPONENTIAL) move the context by Σ wⱼ rⱼ (vⱼ - context) / (1 + Σ w r), and
    a weight is the context of a value that is 1 at its key. The sum of them, the division and the sum of values add γ(k) each.
    """
    w = weights.double()
    v = v.double().repeat_interleave(w.shape[1] // v.shape[1], 1)
    r = w * (torch.expm1(errors) + gamma(dtype, EXPONENTIAL))
    total = r.sum(-1, keepdim=True)
    assert (total < 0.5).all(), f"the scores have no digit in {dtype}: compute the expected value in a wider dtype"
    several = 2 * gamma(dtype, w.shape[-1] + 2)
    off = (r * (1 - w) + w * (total - r)) / (1 - total) + several * w + SMALLEST
    apart = [(r * (x.unsqueeze(-2) - (w @ x.unsqueeze(-1))).abs()).sum(-1) for x in v.unbind(-1)]  # each (b, h, q)
    context = torch.stack(apart, -1) / (1 - total) + several * (w @ v.abs()) + SMALLEST * v.abs().sum(-2, keepdim=True)
    return AttentionBounds(2 * errors, 2 * off, 2 * context)


def half_bound(dtype: torch.dtype, v: Tensor, weights: Tensor) -> Tensor:
    """How far weights and context move that are rounded to a half precision, once each; one side, to add to float32's bound."""
    w = weights.double()
    v = v.double().repeat_interleave(w.shape[1] // v.shape[1], 1)
    least = torch.finfo(dtype).smallest_normal * unit_roundoff(dtype)  # below the normal numbers rounding has one size
    return gamma(dtype, 1) * (w @ v.abs() + (w @ v).abs()) + least * (1 + v.abs().sum(-2, keepdim=True))


def score_slope_bound(dtype: torch.dtype, bounds: AttentionBounds, v: Tensor, weights: Tensor, grad: Tensor) -> Tensor:
    """Of the gradient w (p - δ) of the scores (b, h, q, k), where p = grad vᵀ and δ = Σ w p = Σ grad context.

    grad: of the context (b, h, q, e), the same in both. p is off by γ(e) |grad| |v|ᵀ; δ by what the context is off, and by its
    own sum over e.
    """
    w, g = weights.double(), grad.double()
    v = v.double().repeat_interleave(w.shape[1] // v.shape[1], 1)
    sizes = g.abs() @ v.abs().mT
    row = (w * sizes).sum(-1, keepdim=True)
    products, slope = g @ v.mT, (g * (w @ v)).sum(-1, keepdim=True)
    apart = (g.abs() * bounds.context).sum(-1, keepdim=True) + sum_bound(dtype, w.shape[-1]) * row
    apart = apart + sum_bound(dtype, v.shape[-1]) * (sizes + row)
    return bounds.weights * (products - slope).abs() + w * apart + sum_bound(dtype, 4) * w * (products - slope).abs()


def gradient_bounds(
    dtype: torch.dtype, q: Tensor, k: Tensor, v: Tensor, weights: Tensor, grad: Tensor, *, scale: float | None = None
) -> list[Tensor]:
    """Of the gradients of q, k and v, for a given gradient of the context; arguments as in `attention_bounds`.

    Weights that are computed again as exp(s - lse) are off by the roundings of lse as well: γ(2) (max |s| + 2 log k).
    """
    heads, groups, queries, keys = q.shape[1], k.shape[1], q.shape[2], k.shape[2]
    factor = 1 / math.sqrt(q.shape[3]) if scale is None else abs(scale)
    w, g, share = weights.double(), grad.double(), heads // groups
    q, k, wide = q.double().abs(), *(x.double().repeat_interleave(share, 1) for x in (k, v))
    k = k.abs()
    exact = attention_bounds(dtype, q, k, wide, w, scale=scale)
    bounds = propagate_errors(dtype, exact.scores / 2, wide, w)
    size = (factor * (q @ k.mT)).where(w > 0, 0).amax(-1, keepdim=True)
    again = bounds.weights + w * sum_bound(dtype, 2) * (size + 2 * math.log(keys))
    bounds = AttentionBounds(bounds.scores, again, bounds.context)
    slopes = factor * score_slope_bound(dtype, bounds, wide, w, g)
    exact_slopes = factor * (w * (g @ wide.mT - (g * (w @ wide)).sum(-1, keepdim=True))).abs()
    of_q = slopes @ k + sum_bound(dtype, keys + 2) * (exact_slopes @ k)
    of_k = slopes.mT @ q + sum_bound(dtype, queries * share + 2) * (exact_slopes.mT @ q)
    of_v = again.mT @ g.abs() + sum_bound(dtype, queries * share + 1) * (w.mT @ g.abs())
    return [of_q, *(x.unflatten(1, (groups, share)).sum(2) for x in (of_k, of_v))]


def logsumexp_bound(dtype: torch.dtype, bounds: AttentionBounds, weights: Tensor, logsumexp: Tensor) -> Tensor:
    """Of each row's log Σ exp(score), (b, h, q): the mean error of its scores, that of the sum, the rounding of the result."""
    exact, keys = weights.double(), weights.shape[-1]
    size = logsumexp.double().abs().nan_to_num(posinf=0) + 2 * math.log(keys + 1)  # of the maximum and of the logarithm
    return (exact * bounds.scores).sum(-1) + 2 * gamma(dtype, keys + EXPONENTIAL) + sum_bound(dtype, 3) * size


def entropy_bound(dtype: torch.dtype, bounds: AttentionBounds, weights: Tensor) -> Tensor:
    """Of each row's -Σ w log w, (b, h, q), and of the same as Σ w log Σ exp - Σ w (score - maximum).

    A w that is off by δ moves it by δ (log w + 1); the terms, of size w (|log w| + log k) at most, are off as w is, and are
    products of a sum of k.
    """
    exact, keys = weights.double(), weights.shape[-1]
    logarithm = exact.clamp(min=SMALLEST).log().abs()
    terms = exact * (logarithm + math.log(keys + 1))
    return (bounds.weights * (logarithm + 1)).sum(-1) + 2 * gamma(dtype, keys + EXPONENTIAL) * terms.sum(-1)
