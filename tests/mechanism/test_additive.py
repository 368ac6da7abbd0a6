import math

import pytest
import torch

from bounds import EXPONENTIAL, assert_within, gamma, propagate_errors, score_slope_bound, sum_bound
from regard import Causal, ConfigError, Padding, ShapeError, Window
from regard.mechanism import additive
from regard.mechanism.additive import additive_attention, attend_additive
from skips import NEEDS_LOOPS

B, H, G, Q, K, N, E = 2, 6, 3, 5, 7, 11, 13
RULES = {"padding": Padding([3, 7]), "causal": Causal(), "window": Causal() & Window(2)}


def tensors(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = (B, H, Q, N), (B, G, K, N), (B, G, K, E), (N,)
    return [torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes]


def test_the_context_is_the_formula_written_out_for_each_query():
    q, k, v, weight = tensors()
    found = additive_attention(q, k, v, weight, Padding([3, 7]))
    for b, h, i in ((0, 0, 0), (1, 3, 2), (1, 5, 4)):
        seen, g = (3, 7)[b], h // (H // G)
        scores = [sum(float(weight[n] * math.tanh(q[b, h, i, n] + k[b, g, j, n])) for n in range(N)) for j in range(seen)]
        total = sum(map(math.exp, scores))
        expected = sum(math.exp(score) / total * v[b, g, j] for j, score in enumerate(scores))
        torch.testing.assert_close(found[b, h, i], expected)


def test_the_steps_end_in_the_context_and_nothing_is_divided():
    q, k, v, weight = tensors()
    steps = attend_additive(q, k, v, weight, Causal(), offset=1)
    assert torch.equal(steps.scaled, steps.scores)
    torch.testing.assert_close(steps.context, additive_attention(q, k, v, weight, Causal(), offset=1))
    torch.testing.assert_close(
        attend_additive(q[0, 0], k[0, 0], v[0, 0], weight).weights, attend_additive(q, k, v, weight).weights[0, 0]
    )


@pytest.mark.parametrize("rule", RULES)
def test_queries_that_go_a_run_at_a_time_find_the_same_context_and_gradient(rule, monkeypatch):
    def all_of_it():
        leaves = [x.requires_grad_() for x in tensors()]
        context = additive_attention(*leaves, RULES[rule], offset=2)
        return context, *torch.autograd.grad(context.square().sum(), leaves)

    expected = all_of_it()
    monkeypatch.setattr(additive, "MAX_TANHS", 2 * B * H * K * N)  # two queries of all heads
    for one, other in zip(all_of_it(), expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.slow
def test_gradients_are_those_of_finite_differences():
    leaves = [x[:, :2, :3] if x.dim() == 4 else x for x in tensors()]
    leaves = [x.detach().requires_grad_() for x in leaves]
    torch.autograd.gradcheck(lambda *x: additive_attention(*x, Padding([2, 0])), leaves)


def test_a_query_that_sees_nothing_gets_zeros():
    context = additive_attention(*tensors(), Padding([0, 4]))
    assert (context[0] == 0).all()
    assert (context[1] != 0).any()


def test_half_precision_is_scored_in_float32_and_autocast_rounds_nothing():
    q, k, v, weight = tensors(torch.bfloat16)
    steps = attend_additive(q, k, v, weight)
    assert (steps.scores.dtype, steps.weights.dtype, steps.context.dtype) == (torch.float32, torch.bfloat16, torch.bfloat16)
    whole = tensors(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = additive_attention(*whole)
    assert torch.equal(found, additive_attention(*whole))


def test_a_weight_of_another_width_is_refused():
    q, k, v, weight = tensors()
    with pytest.raises(ShapeError, match=r"weight must be \(n,\), .* expected \(11,\), got \(10,\)"):
        additive_attention(q, k, v, weight[:-1])
    with pytest.raises(ConfigError, match="a mask must be a Mask"):
        additive_attention(q, k, v, weight, torch.ones(Q, K))


def context_and_gradients(leaves, rule, grad):
    leaves = [x.detach().requires_grad_() for x in leaves]
    context = additive_attention(*leaves, rule)
    return context, *torch.autograd.grad(context, leaves, grad.to(context.dtype))


# a float32 sum and its tanh (1 - e) / (1 + e), e ≤ 1 / e: an error of e counts less than once, then there are four roundings
TANH = EXPONENTIAL + 5


def additive_bounds(q, k, v, weight, rule, grad):
    """How far float32 may be off in the context and in the gradients of q, k, v and weight."""
    share, groups, dtype = q.shape[1] // k.shape[1], k.shape[1], torch.float32
    v_all, k_all = (x.repeat_interleave(share, 1) for x in (v, k))
    tanh = (q.unsqueeze(3) + k_all.unsqueeze(2)).tanh()  # (b, h, q, k, n)
    size, weights = tanh.abs() @ weight.abs(), attend_additive(q, k, v, weight, rule).weights
    errors = (gamma(dtype, len(weight)) + gamma(dtype, TANH, alike=True)) * size
    bounds = propagate_errors(dtype, errors + gamma(dtype, 2) * size.amax(-1, keepdim=True), v_all, weights)
    apart = score_slope_bound(dtype, bounds, v_all, weights, grad)
    slope = (weights * (grad @ v_all.mT - (grad * (weights @ v_all)).sum(-1, keepdim=True))).abs()
    several = sum_bound(dtype, 2 * TANH + 2, alike=True)  # of 1 - tanh²
    rises = (1 - tanh.square()) * weight.abs()
    each = apart.unsqueeze(-1) * rises + several * slope.unsqueeze(-1) * weight.abs()
    along, across = ((slope.unsqueeze(-1) * rises).sum(axis) for axis in (3, 2))  # (b, h, q, n) and (b, h, k, n)
    of_q = each.sum(3) + sum_bound(dtype, k.shape[2] + 2) * along
    of_k = each.sum(2) + sum_bound(dtype, q.shape[2] * share + 2) * across
    of_v = bounds.weights.mT @ grad.abs() + sum_bound(dtype, q.shape[2] * share + 1) * (weights.mT @ grad.abs())
    terms = sum_bound(dtype, slope.numel()) + sum_bound(dtype, TANH, alike=True)
    of_weight = ((apart + terms * slope).unsqueeze(-1) * tanh.abs()).flatten(0, 3).sum(0)
    of_k, of_v = (x.unflatten(1, (groups, share)).sum(2) for x in (of_k, of_v))
    return bounds.context, of_q, of_k, of_v, of_weight


@NEEDS_LOOPS
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "shapes", [((B, H, Q, N), (B, G, K, N), (B, G, K, E), (N,)), ((2, 1, 1, 67), (2, 1, 7, 67), (2, 1, 7, 3), (67,))]
)
def test_the_loops_are_as_near_to_float64_as_torch(rule, shapes, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(*shape, dtype=torch.float32, generator=generator) for shape in shapes]
    wide, grad = [x.double() for x in leaves], torch.randn(*shapes[0][:3], shapes[2][3], generator=generator).double()
    exact, allowed = context_and_gradients(wide, RULES[rule], grad), additive_bounds(*wide, RULES[rule], grad)
    for least in (0, 2**60):  # by the loops, and by torch
        monkeypatch.setattr(additive, "LEAST", least)
        for found, expected, bound in zip(context_and_gradients(leaves, RULES[rule], grad), exact, allowed, strict=True):
            assert_within(found, expected, bound)


@NEEDS_LOOPS
def test_the_loops_keep_a_nan_in_its_own_row_and_let_a_hidden_key_have_no_gradient(monkeypatch):
    monkeypatch.setattr(additive, "LEAST", 0)
    q, k, v, weight = tensors(torch.float32)
    q[1, 0, 2, 3] = math.nan
    context = additive_attention(q, k, v, weight)
    assert context[1, 0, 2].isnan().all()
    assert context.isnan().sum() == E
    leaves = [x.requires_grad_() for x in tensors(torch.float32)]
    additive_attention(*leaves, Padding([3, 7])).square().sum().backward()
    assert (leaves[1].grad[0, :, 3:] == 0).all()
    assert (leaves[1].grad[0, :, :3] != 0).all()


@NEEDS_LOOPS
def test_the_loops_hold_no_tanh_for_the_gradient(monkeypatch):
    b, s, n = 8, 64, 128
    x, queries = torch.randn(b, 1, s, n, requires_grad=True), torch.randn(b, 1, s, n)
    kept = {}
    for least in (0, 2**60):
        monkeypatch.setattr(additive, "LEAST", least)
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda y, sizes=sizes: (sizes.append(y.numel()), y)[1], lambda y: y):
            additive_attention(queries, x, x, torch.randn(n))
        kept[least] = max(sizes)
    assert kept[0] <= b * s * n < b * s * s * n <= kept[2**60]
