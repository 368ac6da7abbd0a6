import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings

import oracle
from bounds import assert_within, attention_bounds, propagate_errors, unit_roundoff
from regard import Causal, Given, Padding, Steps, Window, attend
from run_limits import limit_examples
from strategies import requests

B, H, Q, K, D, E = 2, 3, 5, 7, 11, 13
NAMES = ["scores", "scaled", "capped", "masked", "weights", "dropped", "context"]


def tensors(dtype=torch.float64, groups=H):
    torch.manual_seed(1)
    return [torch.randn(*shape, dtype=dtype) for shape in ((B, H, Q, D), (B, groups, K, D), (B, groups, K, E))]


def close(found, expected, atol=1e-12):
    torch.testing.assert_close(found, torch.as_tensor(expected), rtol=0, atol=atol)


@pytest.mark.slow
@pytest.mark.emulated
@settings(max_examples=limit_examples(300))
@given(requests())
def test_attend_is_the_formula_written_out_in_float64(asked):
    arrays, options = asked.numpy()
    weights, context = oracle.attention(*arrays, asked.sees, **options)
    steps = attend(asked.q, asked.k, asked.v, asked.mask, **asked.options)
    close(steps.weights, weights)
    close(steps.context, context)


def test_every_step_is_the_one_before_it_with_one_thing_done():
    q, k, v = tensors()
    bias, mask = torch.randn(H, Q, K, dtype=torch.float64), Causal()
    torch.manual_seed(3)
    steps = attend(q, k, v, mask, scale=0.7, softcap=2.0, bias=bias, dropout=0.5)
    assert [name for name, _ in steps.items()] == NAMES
    close(steps.scores, q @ k.mT)
    close(steps.scaled, steps.scores * 0.7)
    close(steps.capped, 2 * (steps.scaled / 2).tanh())
    close(steps.masked, (steps.capped + bias).masked_fill(~mask.table(Q, K), -math.inf))
    close(steps.weights, steps.masked.softmax(-1))
    torch.manual_seed(3)
    close(steps.dropped, F.dropout(steps.weights, 0.5), atol=0)
    close(steps.context, steps.dropped @ v)


@pytest.mark.parametrize("rank", [4, 3, 2])
def test_every_step_has_the_rank_of_the_input(rank):
    q, k, v = (x[(0,) * (4 - rank)] for x in tensors())
    steps = attend(q, k, v, Causal(), bias=torch.zeros(Q, K, dtype=torch.float64))
    assert all(step.dim() == rank for _, step in steps.items())
    assert steps.weights.shape[-2:] == (Q, K)
    assert steps.context.shape[-2:] == (Q, E)
    whole = attend(*tensors(), Causal())
    close(steps.context, whole.context[(0,) * (4 - rank)])


def test_grouped_and_single_key_heads_equal_repeated_ones():
    q = torch.randn(B, 6, Q, D, dtype=torch.float64)
    for groups in (1, 2, 3, 6):
        _, k, v = tensors(groups=groups)
        repeated = [torch.stack([x[:, n // (6 // groups)] for n in range(6)], 1) for x in (k, v)]
        close(attend(q, k, v).context, attend(q, *repeated).context)


def test_every_row_of_weights_is_a_probability_or_zero():
    lengths = [0, 4]
    weights = attend(*tensors(), Padding(lengths)).weights
    close(weights.sum(-1)[0], torch.zeros(H, Q, dtype=torch.float64))
    close(weights.sum(-1)[1], torch.ones(H, Q, dtype=torch.float64))


def test_the_future_has_no_weight_and_no_gradient():
    q, k, v = tensors()
    v.requires_grad_()
    steps = attend(q, k, v, Causal())
    assert (steps.weights.triu(1) == 0).all()
    steps.context[:, :, 2].sum().backward()
    assert (v.grad[:, :, 3:] == 0).all()
    assert (v.grad[:, :, :3] != 0).any()


def test_a_sink_takes_weight_away_and_gives_none():
    q, k, v = tensors()
    sinks = torch.randn(H, dtype=torch.float64)
    weights = attend(q, k, v, sinks=sinks).weights
    exponentials = (q @ k.mT / math.sqrt(D)).exp()
    close(weights, exponentials / (exponentials.sum(-1, keepdim=True) + sinks.exp().view(H, 1, 1)))


def test_a_row_blind_by_mask_and_bias_together_gives_zeros_forwards_and_backwards():
    q, k, v = (x.requires_grad_() for x in tensors())
    bias = torch.zeros(Q, K, dtype=torch.float64)
    bias[1, :2] = -math.inf  # what causal leaves of row 1
    steps = attend(q, k, v, Causal(), bias=bias.requires_grad_())
    assert (steps.weights[:, :, 1] == 0).all()
    assert (steps.context[:, :, 1] == 0).all()
    steps.context.sum().backward()
    for x in (q, k, v, bias):
        assert not x.grad.isnan().any()
    assert (q.grad[:, :, 1] == 0).all()
    assert (q.grad[:, :, 2] != 0).any()


def test_no_keys_give_a_context_of_zeros_and_no_queries_give_none():
    q, k, v = tensors()
    assert torch.equal(attend(q, k[:, :, :0], v[:, :, :0]).context, torch.zeros(B, H, Q, E, dtype=torch.float64))
    assert attend(q[:, :, :0], k, v).context.shape == (B, H, 0, E)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_float32_from_the_scores_to_the_softmax(dtype):
    steps = attend(*tensors(dtype), Causal(), scale=0.5, softcap=3.0, bias=torch.zeros(1), dropout=0.1)
    found = [step.dtype for _, step in steps.items()]
    assert found == [torch.float32] * 4 + [dtype] * 3
    assert {step.dtype for _, step in attend(*tensors()).items()} == {torch.float64}


def test_scores_that_overflow_in_float16_do_not_overflow_here():
    q, k, v = (x * 300 for x in tensors(torch.float16))
    steps = attend(q, k, v)
    assert steps.scores.abs().max() > torch.finfo(torch.float16).max
    assert steps.context.isfinite().all()
    exact = attend(q.double(), k.double(), v.double()).weights
    errors = attention_bounds(torch.float32, q, k, v, exact).scores / 2
    rounding = unit_roundoff(torch.float16) * exact.clamp_min(torch.finfo(torch.float16).smallest_normal)
    assert_within(steps.weights, exact, propagate_errors(torch.float32, errors, v, exact).weights + rounding)


@pytest.mark.parametrize(("where", "hit"), [("q", [2]), ("k", [4]), ("v", [4])])
def test_nan_goes_out_in_the_rows_that_see_it_and_in_no_other(where, hit):
    q, k, v = tensors()
    {"q": q, "k": k, "v": v}[where][:, :, 2 if where == "q" else 4, 0] = math.nan
    steps = attend(q, k, v, Causal())
    assert steps.context.isnan().any(-1).any(0).any(0).nonzero().flatten().tolist() == hit
    assert steps.context.isnan().any(-1).all(0).all(0).nonzero().flatten().tolist() == hit


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("keys", [1, 3, 33, 34, 68, 129, 300])
def test_a_query_that_is_no_number_leaves_the_other_rows_finite(keys, dtype):
    """Red where torch multiplies bfloat16 by AMX and attend leaves it the product of what is no number."""
    q, k, v = torch.randn(1, 2, 65, 8).to(dtype), torch.randn(1, 2, keys, 8).to(dtype), torch.randn(1, 2, keys, 8).to(dtype)
    q[:, :, ::3] = torch.nan
    context = attend(q, k, v).context
    assert context[:, :, ::3].isnan().all()
    assert context[:, :, 1::3].isfinite().all()
    assert context[:, :, 2::3].isfinite().all()


def test_a_blind_query_stays_zero_whatever_the_values_hold():
    q, k, v = tensors()
    v[:] = math.nan
    k[:] = math.inf
    assert (attend(q, k, v, ~Causal() & Window(0, 0)).context == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_autocast_leaves_float32_from_the_scores_to_the_softmax(dtype):
    q, k, v = tensors(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        steps = attend(q, k, v, Causal())
    rounded = [x if dtype == torch.float64 else x.bfloat16() for x in (q, k, v)]
    for (name, found), (_, expected) in zip(steps.items(), attend(*rounded, Causal()).items(), strict=True):
        assert torch.equal(found, expected), name


def test_nan_in_a_hidden_value_leaves_the_gradients_of_others_whole():
    q, k, v = tensors()
    v[:, :, 6] = math.nan
    q.requires_grad_()
    k.requires_grad_()
    attend(q, k, v, Padding([6, 6])).context.sum().backward()
    assert not q.grad.isnan().any()
    assert not k.grad.isnan().any()


def test_dropout_is_torch_s_own_draw_and_leaves_the_generator_where_torch_does():
    q, k, v = tensors()
    torch.manual_seed(7)
    steps = attend(q, k, v, dropout=0.3)
    after = torch.rand(1)
    torch.manual_seed(7)
    assert torch.equal(steps.dropped, F.dropout(steps.weights, 0.3))
    assert torch.equal(torch.rand(1), after)
    kept = steps.dropped != 0
    close(steps.dropped[kept], steps.weights[kept] / 0.7)


@pytest.mark.slow
@pytest.mark.emulated
@settings(max_examples=limit_examples(40))
@given(requests(longest=4))
def test_gradients_are_those_of_finite_differences(asked):
    leaves = asked.leaves()
    torch.autograd.gradcheck(lambda *_: attend(asked.q, asked.k, asked.v, asked.mask, **asked.options).context, leaves)


def test_a_per_sample_transform_can_map_over_it():
    q, k, v = tensors()
    mapped = torch.func.vmap(lambda a, b, c: attend(a, b, c, Causal()).context)(q, k, v)
    close(mapped, attend(q, k, v, Causal()).context)


def test_steps_are_a_record_that_cannot_be_changed():
    steps = attend(*tensors())
    assert isinstance(steps, Steps)
    with pytest.raises(AttributeError):
        steps.weights = steps.scores


def test_a_hidden_key_is_hidden_even_where_the_bias_is_infinite():
    q, k, v = tensors()
    table = torch.ones(Q, K, dtype=torch.bool)
    table[:, 3] = False
    bias = torch.zeros(Q, K, dtype=torch.float64)
    bias[:, 3] = math.inf
    assert (attend(q, k, v, Given(table), bias=bias).weights[..., 3] == 0).all()
