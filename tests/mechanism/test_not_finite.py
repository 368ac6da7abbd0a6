"""attention is attend in each place, finite, infinite and NaN alike: for any scale, and for what is no number in any input."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bounds import TORCH_EXPONENTIAL, assert_within, attention_bounds, gamma, half_bound, propagate_errors
from regard import Causal, Documents, Everything, Given, Padding, Prefix, Window, attend, attention
from regard.errors import ConfigError
from run_limits import limit_examples

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
LENGTHS = st.sampled_from([1, 2, 7, 15, 16, 17, 33, 64, 128, 129, 200, 257, 300])
BROKEN = [math.inf, -math.inf, math.nan]
FARTHEST = 2**61


@st.composite
def rules(draw, queries: int, keys: int):
    """A rule of each kind, in forms that different kernels take."""
    table = torch.rand(queries, keys) > 0.4
    every = [Everything(), Causal(), Window(5, 2), Causal() & Window(9), Padding([keys // 2]), Causal() | Prefix(3)]
    every += [Documents(torch.arange(keys) // 5), Given(table), ~Causal(), Window(FARTHEST)]
    return draw(st.sampled_from(every))


@st.composite
def inputs(draw, scales, is_broken: bool):
    """q, k, v, a rule and options; with `is_broken` one number of each may be infinite or NaN, or near the largest."""
    queries = draw(LENGTHS)
    keys = queries if draw(st.booleans()) else draw(LENGTHS)
    dtype, (heads, groups) = draw(st.sampled_from(DTYPES)), draw(st.sampled_from([(1, 1), (2, 1), (4, 2)]))
    d, e = draw(st.sampled_from([(8, 8), (5, 9), (64, 64), (1, 1)]))
    torch.manual_seed(draw(st.integers(0, 2**32 - 1)))
    shapes = (1, heads, queries, d), (1, groups, keys, d), (1, groups, keys, e)
    tensors = [torch.randn(*shape) for shape in shapes]
    options: dict[str, Any] = {"scale": draw(scales)}
    if draw(st.booleans()):
        options["bias"] = torch.randn(draw(st.sampled_from([(queries, keys), (keys,), (heads, queries, keys), (queries, 1)])))
    if draw(st.booleans()):
        options["sinks"] = torch.randn(heads).to(draw(st.sampled_from([dtype, torch.float32])))
    if draw(st.booleans()):
        far = st.sampled_from([1, -3, keys - queries, FARTHEST, -FARTHEST, 2**40])
        options["offset"] = draw(far | far.map(lambda n: torch.tensor([n])))
    if is_broken:
        for x in (*tensors, *([options["bias"]] if "bias" in options else [])):
            if draw(st.booleans()):
                number = draw(st.sampled_from([*BROKEN, 6e4 if dtype == torch.float16 else 1e30]))
                x.view(-1)[draw(st.integers(0, x.numel() - 1))] = number
    if "bias" in options:
        options["bias"] = options["bias"].to(draw(st.sampled_from(DTYPES)))
    return [x.to(dtype) for x in tensors], draw(rules(queries, keys)), options


@pytest.mark.slow
@pytest.mark.emulated
@settings(max_examples=limit_examples(400), deadline=None)
@given(inputs(st.sampled_from([None, -0.5, 0.0, -1.0, 1e-30, 30.0, 1e6, 1e38, -1e38]), is_broken=True))
def test_what_is_no_number_comes_out_where_attend_has_it(asked):
    (q, k, v), rule, options = asked
    found, expected = attention(q, k, v, rule, **options), attend(q, k, v, rule, **options).context
    assert found.dtype == expected.dtype
    assert torch.equal(found.isnan(), expected.isnan())
    for infinity in (math.inf, -math.inf):
        assert torch.equal(found == infinity, expected == infinity)
    exact = attend(q.double(), k.double(), v.double(), rule, **widen(options))
    finite = expected.isfinite() & exact.context.isfinite()  # in float64 fewer products overflow
    allowed = context_bounds(q, k, v, exact.weights, options)
    assert_within(found[finite], exact.context[finite], allowed[finite])


def widen(options: dict[str, Any]) -> dict[str, Any]:
    """The options with their tensors in float64."""
    return {name: x.double() if torch.is_tensor(x) and x.is_floating_point() else x for name, x in options.items()}


def context_bounds(q, k, v, weights, options):
    """How far attention may be from the formula in float64, in each place; infinite where a score is too large for a bound.

    What is no number counts as 0: where the result is finite, its weight is 0.
    """
    precision = torch.float64 if q.dtype == torch.float64 else torch.float32
    wide = widen(options)
    queries, keys, values = (x.double().nan_to_num(0, 0, 0) for x in (q, k, v))
    weights, bias, sinks = weights.nan_to_num(0), wide.get("bias"), wide.get("sinks")
    bias = None if bias is None else bias.nan_to_num(0, 0, 0)
    off = attention_bounds(precision, queries, keys, values, weights, scale=options["scale"], bias=bias).scores / 2
    off = off + TORCH_EXPONENTIAL.get(q.dtype, 0.0)
    if sinks is not None:  # one more score, of a value of zeros
        size = sinks.double().abs().view(-1, 1, 1).expand(*off.shape[:3], 1)
        last = gamma(precision, q.shape[3] + 8) * size + TORCH_EXPONENTIAL.get(q.dtype, 0.0)
        off, weights = torch.cat((off, last), 3), torch.cat((weights, 1 - weights.sum(-1, keepdim=True)), 3)
        values = torch.nn.functional.pad(values, (0, 0, 0, 1))
    is_known = (weights * torch.expm1(off.clamp(max=1))).sum(-1, keepdim=True) < 0.4
    is_known &= off.amax(-1, keepdim=True) < 1  # of keys whose weight is 0, too
    allowed = propagate_errors(precision, off.where(is_known, 0.0), values, weights).context.where(is_known, math.inf)
    allowed = allowed + half_bound(q.dtype, values, weights) if q.element_size() == 2 else allowed
    return allowed.nan_to_num(math.inf, math.inf)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.0, 1e-46, -1e-300, 1e-30])
@pytest.mark.parametrize("keys", [1, 15, 40, 300])
@pytest.mark.parametrize("mask", [Everything(), Causal(), Window(5, 2)], ids=str)
def test_a_product_that_overflows_is_nan_however_small_the_scale(mask, keys, scale, dtype):
    q, k, v = (torch.randn(1, 1, keys, 8, dtype=dtype) for _ in range(3))
    q[..., 0, 0] = k[..., 0, 0] = 1e30
    found, expected = attention(q, k, v, mask, scale=scale), attend(q, k, v, mask, scale=scale).context
    assert expected[0, 0, 0].isnan().all()
    assert torch.equal(found.isnan(), expected.isnan())


@pytest.mark.slow
@pytest.mark.emulated
@settings(max_examples=limit_examples(200), deadline=None)
@given(inputs(st.sampled_from([None, -0.5, 0.0, -1.0, 0.1]), is_broken=False))
def test_any_scale_and_any_dtype_of_the_bias_gives_the_formula_in_float64(asked):
    (q, k, v), rule, options = asked
    exact = attend(q.double(), k.double(), v.double(), rule, **widen(options))
    assert_within(attention(q, k, v, rule, **options), exact.context, context_bounds(q, k, v, exact.weights, options))


@pytest.mark.parametrize("offset", [2**61 + 1, -(2**61) - 1, 2**63, -(2**63) - 1, 2**70, torch.tensor([2**63 - 1])])
@pytest.mark.parametrize("form", [attend, attention])
def test_a_position_whose_sums_would_not_be_int64_is_refused(form, offset):
    x = torch.randn(1, 1, 3, 2)
    with pytest.raises(ConfigError, match=r"between -2\*\*61 and 2\*\*61"):
        form(x, x, x, Causal(), offset=offset)


@pytest.mark.parametrize("rule", [Window, Prefix, lambda n: Padding([n])])
def test_a_number_of_keys_whose_sums_would_not_be_int64_is_refused(rule):
    with pytest.raises(ConfigError, match=r"at most 2\*\*61"):
        rule(2**61 + 1)


def test_an_infinity_in_a_later_value_leaves_the_earlier_rows_alone():
    q, k, v = torch.randn(3, 1, 2, 64, 8)
    v[0, 0, 10, 3] = math.inf
    found = attention(q, k, v, Causal())
    assert found[0, 0, :10].isfinite().all()
    assert (found[0, 0, 10:, 3] == math.inf).all()
    assert found[0, 1].isfinite().all()
