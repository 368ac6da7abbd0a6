"""The compiled comparison of sampled rows with a model's own weights, beside a softmax in float64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regard.mechanism.mask_algebra import EVERYTHING
from regard.mechanism.masks import Causal, Window
from regard.observe.interception.attention_call import AttentionCall
from regard.observe.interception.handwritten.scores import row_comparison
from regard.observe.interception.handwritten.scores.row_comparison import build_row_layout, build_sampled_rows
from regard.observe.interception.thread_state import STATE

pytest.importorskip("numba", reason="the compared loop is compiled by numba")

EPS = torch.finfo(torch.float32).eps


@pytest.fixture(autouse=True)
def forget_tables():
    """Drop the tables of hidden keys after a test, as the end of a forward does."""
    yield
    STATE.inferred_masks.clear()


def build_case(seed, b, h, shared, t, d, *, mask=EVERYTHING, biased=False, scale=None):
    """Return a call with queries and keys as views of one projection, its weights, and the sampled rows."""
    torch.manual_seed(seed)
    q = torch.randn(b, t, h, d).transpose(1, 2)
    k = torch.randn(b, t, shared, d).transpose(1, 2)
    bias = torch.randn(b, h, 1, t) if biased else None
    call = AttentionCall(kernel="by hand", q=q, k=k, v=k, mask=mask, bias=bias, scale=scale)
    scores = q.double() @ k.double().repeat_interleave(h // shared, 1).mT * (d**-0.5 if scale is None else scale)
    if bias is not None:
        scores += bias
    places = torch.arange(t)
    weights = scores.masked_fill(~mask.block(places, places, 0), -torch.inf).softmax(-1).float()
    return call, weights, build_sampled_rows(t, max(1, t // row_comparison.SAMPLED_ROWS), weights.device)


def are_rows_near(call, weights, rows):
    """Return what the compiled loop says of the weights of a call."""
    layout = build_row_layout(call, weights, rows, 0.0)
    assert layout is not None
    return layout.are_rows_near(call.q, call.k, weights)


@given(
    st.integers(0, 99),
    st.integers(1, 2),
    st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 1)]),
    st.integers(1, 70),
    st.integers(1, 33),
    st.sampled_from([EVERYTHING, Causal(), Causal() & Window(left=3)]),
    st.booleans(),
    st.sampled_from([None, 1.0, 0.3]),
)
def test_weights_are_near_their_softmax_and_no_others_are(seed, b, heads, t, d, mask, biased, scale):
    call, weights, rows = build_case(seed, b, *heads, t, d, mask=mask, biased=biased, scale=scale)
    assert build_row_layout(call, weights, rows, 0.0) is not None
    size = float(call.q.norm(dim=-1).max() * call.k.norm(dim=-1).max()) * (d**-0.5 if scale is None else scale)
    if size + 4 * biased < d:  # else rounding alone may be more than the quick comparison allows
        assert are_rows_near(call, weights, rows)
    place = (b - 1, heads[0] - 1, rows[seed % len(rows)], seed % t)
    for other in (weights[place] + 16 * EPS * (1 + d + size), torch.nan):
        changed = weights.clone()
        changed[place] = other
        assert not are_rows_near(call, changed, rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("hides", [-1e4, -1e9])
def test_a_number_that_hides_a_key_allows_no_difference_of_others(dtype, hides):
    call, _, rows = build_case(0, 1, 2, 2, 12, 8)
    call.q, call.k = call.q.to(dtype), call.k.to(dtype)
    call.bias = torch.randn(1, 2, 12, 12, dtype=dtype)
    call.bias[..., 5] = hides
    weights = (call.q @ call.k.mT * 8**-0.5 + call.bias).softmax(-1)
    assert row_comparison.compare_rows(call, weights, 0.0, every=False) is None
    call.bias[..., 3] += 0.1
    difference = row_comparison.compare_rows(call, weights, 0.0, every=False)
    expected = (call.q @ call.k.mT * 8**-0.5 + call.bias).softmax(-1)[:, :, rows] - weights[:, :, rows]
    assert difference == pytest.approx(float(expected.abs().max()), rel=1e-4)
