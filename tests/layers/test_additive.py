import math

import pytest
import torch

from bounds import EXPONENTIAL, assert_within, gamma, propagate_errors, sum_bound
from regard import AdditiveAttention, Padding, ShapeError

B, Q, K, QW, KW, N, E = 2, 5, 7, 11, 13, 3, 4


def layer():
    torch.manual_seed(0)
    return AdditiveAttention(QW, KW, N).double()


def tensors():
    torch.manual_seed(1)
    return [torch.randn(*shape, dtype=torch.float64) for shape in ((B, Q, QW), (B, K, KW), (B, K, E))]


def test_the_context_is_the_formula_of_bahdanau_written_out():
    ours = layer()
    queries, keys, values = tensors()
    weight, U, W = ours.weight.detach(), ours.W_key.weight.detach(), ours.W_query.weight.detach()
    for b in range(B):
        for i in range(Q):
            scores = [float(weight @ torch.tanh(W @ queries[b, i] + U @ keys[b, j])) for j in range(K)]
            exponentials = [math.exp(score) for score in scores]
            expected = sum(e / sum(exponentials) * values[b, j] for j, e in enumerate(exponentials))
            torch.testing.assert_close(ours(queries, keys, values)[b, i], expected)


def test_steps_hold_the_scores_undivided_and_end_in_the_context():
    queries, keys, values = tensors()
    steps = layer().steps(queries, keys, values, Padding([K, 2]))
    assert steps.scores.shape == (B, Q, K)
    assert torch.equal(steps.scores, steps.scaled)
    assert (steps.weights[1, :, 2:] == 0).all()
    torch.testing.assert_close(steps.context, layer()(queries, keys, values, Padding([K, 2])))


def test_padded_keys_change_nothing():
    queries, keys, values = tensors()
    found = layer()(queries, keys, values, Padding([3, 3]))
    torch.testing.assert_close(found, layer()(queries, keys[:, :3], values[:, :3]))


@pytest.mark.slow
def test_gradients_are_those_of_finite_differences():
    ours = layer()
    leaves = [x.requires_grad_() for x in tensors()] + list(ours.parameters())
    torch.autograd.gradcheck(lambda q, k, v, *_: ours(q, k, v, Padding([2, 0])), leaves)


@torch.no_grad()
def autocast_bounds(ours, queries, keys, values, weights):
    """How far the context may be off: a projection's input, weights and output are rounded; no slope of tanh is above 1."""
    rounded = gamma(torch.bfloat16, 3) + sum_bound(torch.float32, KW)
    q, k = (rounded * (x.abs() @ W.weight.abs().T) for x, W in ((queries, ours.W_query), (keys, ours.W_key)))
    size = ours.weight.abs()
    errors = (q.unsqueeze(2) + k.unsqueeze(1)) @ size + sum_bound(torch.float32, N + EXPONENTIAL + 5) * size.sum()
    one_head = (x.unsqueeze(1) for x in (errors, values, weights))
    return propagate_errors(torch.float32, *one_head).context[:, 0] / 2  # it is compared with float64


def test_autocast_runs_it_in_float32_from_the_scores_on():
    ours = layer().float()
    queries, keys, values = (x.float() for x in tensors())
    with torch.autocast("cpu", torch.bfloat16):
        steps = ours.steps(queries, keys, values)
    assert steps.scores.dtype == torch.float32
    ours, (queries, keys, values) = ours.double(), (x.double() for x in (queries, keys, values))
    exact = ours.steps(queries, keys, values)
    assert_within(steps.context, exact.context, autocast_bounds(ours, queries, keys, values, exact.weights))


def test_wrong_widths_name_the_input():
    queries, keys, values = tensors()
    with pytest.raises(ShapeError, match=r"queries is .* its d_in is 13, but the layer's is 11"):
        layer()(keys, keys, values)
    with pytest.raises(ShapeError, match=r"keys is .* its d_in is 11, but the layer's is 13"):
        layer()(queries)


def test_keys_that_are_projected_once_serve_queries_that_come_one_after_the_other():
    ours = layer()
    queries, keys, values = tensors()
    rule = Padding([4, K])
    projected = ours.project(keys)
    found = torch.cat([ours.attend_projected(query, projected, values, rule) for query in queries.split(1, 1)], 1)
    torch.testing.assert_close(found, ours(queries, keys, values, rule))


def test_projected_keys_are_in_the_dtype_of_the_weights_so_that_autocast_sums_no_gradient_in_half_precision():
    ours = layer().float()
    queries, keys, values = (x.float() for x in tensors())
    with torch.autocast("cpu", torch.bfloat16):
        projected = ours.project(keys)
        assert ours.W_key(keys).dtype == torch.bfloat16  # as torch rounds it
        assert ours.attend_projected(queries, projected, values).dtype == projected.dtype == torch.float32


def test_keys_that_were_not_projected_are_refused_where_projected_ones_are_asked_for():
    queries, keys, values = tensors()
    with pytest.raises(ShapeError, match=r"projected keys is .* its d_in is 13, but the layer's is 3"):
        layer().attend_projected(queries, keys, values)
