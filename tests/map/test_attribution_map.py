"""An AttributionMap is the matrix of its entries, whatever the mask, the groups and the way it is asked."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bounds import sum_bound
from regard import AttentionMap, Causal
from regard.errors import ConfigError, ShapeError
from regard.map.attribution_map import AttributionMap
from regard.map.pooling import bin_edges
from regard.mechanism import attend
from strategies import requests

EQUAL = 1e-10  # float64


@st.composite
def attributions(draw, dtype=torch.float64):
    asked = draw(requests(dtype))
    weights = AttentionMap(asked.q, asked.k, asked.mask, **asked.options)
    b, h, q, _ = weights.shape
    left = torch.randn(b, h, q, asked.v.shape[3], dtype=dtype)
    factor = draw(st.sampled_from(["one", "weights", "cut"]))
    if factor == "cut" and (weights.dense() > 0.99).any():  # 1 - w would magnify rounding
        factor = "weights"
    return AttributionMap(weights, left, asked.v, factor=factor), asked


def dense(found: AttributionMap, asked) -> torch.Tensor:
    """The matrix, written out."""
    b, h, q, k = found.shape
    products = found.left @ found.right.repeat_interleave(h // found.right.shape[1], 1).mT
    weights = found.weights.dense()
    if found.factor == "weights":
        return products * weights
    if found.factor == "cut":  # each key hidden, one after the other
        kept = weights.unsqueeze(-2) * ~torch.eye(k, dtype=torch.bool)  # (b, h, q, hidden, k)
        kept = kept / (1 - weights).unsqueeze(-1)
        return (kept * products.unsqueeze(-2)).sum(-1) - (weights * products).sum(-1, keepdim=True)
    places = itertools.product(range(b), range(h), range(q), range(k))
    visible = torch.tensor([asked.sees(*place) for place in places], dtype=torch.bool).view(b, h, q, k)
    bias = asked.options.get("bias")
    return products.where(visible if bias is None else visible & (bias != -torch.inf), 0)


@given(attributions())
def test_entries_sums_products_and_pictures_are_those_of_the_matrix(one):
    found, asked = one
    expected = dense(found, asked)
    b, k = found.shape[0], found.shape[3]
    assert (found.dense() - expected).abs().max() < EQUAL if expected.numel() else True
    overview = found.overview()
    assert torch.allclose(overview.row_sums, expected.sum(-1), rtol=0, atol=EQUAL)
    assert torch.allclose(overview.column_sums, expected.sum(-2), rtol=0, atol=EQUAL)
    if k:
        assert torch.allclose(overview.largest.abs(), expected.abs().amax(-1), rtol=0, atol=EQUAL)
        assert torch.allclose(overview.mean, expected, rtol=0, atol=EQUAL)
        assert torch.allclose(overview.max, expected, rtol=0, atol=EQUAL)
        values, keys = found.top(k)
        assert torch.allclose(expected.gather(-1, keys), values, rtol=0, atol=EQUAL)
        assert (values.abs().diff(dim=-1) <= EQUAL).all()
    x = torch.randn(b, 1, k, 2, dtype=torch.float64)
    assert torch.allclose(found @ x, expected @ x, rtol=0, atol=EQUAL * max(k, 1))
    r = torch.randn(b, 1, found.shape[2], 2, dtype=torch.float64)
    assert torch.allclose(found.mT @ r, expected.mT @ r, rtol=0, atol=EQUAL * found.shape[2])
    assert torch.allclose(found.mass(slice(k // 2)), expected[..., : k // 2].sum(-1), rtol=0, atol=EQUAL)


@given(attributions(), st.integers(1, 5), st.integers(1, 5))
def test_bins_hold_the_signed_mean_the_sum_or_the_entry_largest_in_size(one, rows, columns):
    found, asked = one
    expected = dense(found, asked)
    q, k = found.shape[2:]
    edges = [bin_edges(0, size, bins).tolist() for size, bins in ((q, rows), (k, columns))]
    pictures = {how: found.pooled(rows, columns, how) for how in ("mean", "sum", "max")}
    for r in range(rows):
        for c in range(columns):
            part = expected[:, :, edges[0][r] : edges[0][r + 1], edges[1][c] : edges[1][c + 1]].flatten(2)
            total = part.sum(-1)
            assert torch.allclose(pictures["sum"][:, :, r, c], total, rtol=0, atol=EQUAL)
            assert torch.allclose(pictures["mean"][:, :, r, c], total / max(part.shape[2], 1), rtol=0, atol=EQUAL)
            if part.shape[2]:
                assert torch.allclose(pictures["max"][:, :, r, c].abs(), part.abs().amax(-1), rtol=0, atol=EQUAL)


@given(requests(torch.float64))
def test_the_gradient_of_the_scores_is_that_of_the_softmax(asked):
    """Beside autograd through the formula, in which the scores of hidden keys are -inf."""
    if asked.v.shape[2] == 0:
        return
    v = asked.v.detach()
    steps = attend(asked.q.detach().requires_grad_(), asked.k.detach(), v, asked.mask, **asked.options)
    left = torch.randn_like(steps.context)
    (expected,) = torch.autograd.grad((steps.context * left).sum(), steps.masked)
    weights = AttentionMap(asked.q, asked.k, asked.mask, **asked.options)
    found = AttributionMap.differentiate_scores(weights, left, v)
    assert torch.allclose(found.dense(), expected.nan_to_num(), rtol=0, atol=EQUAL)
    assert torch.allclose(found.row_sums(), expected.nan_to_num().sum(-1), rtol=0, atol=EQUAL)


@given(attributions(torch.float32))
def test_the_certificate_says_how_far_the_rows_are_from_their_identity(one):
    found, _ = one
    if found.factor != "weights":
        with pytest.raises(ConfigError, match="only a map of weights times products"):
            found.certificate()
        return
    b, h, q, k = found.shape
    certificate = found.certificate()
    assert certificate.rows == b * h * q
    # both sides are sums of k weights times e products in float32, in another order; the error is relative to the entries, in
    # which the e products of one may have cancelled
    entries = found.dense().abs().sum(-1)
    terms = found.weights.dense() * (found.left.abs() @ found.right.abs().repeat_interleave(h // found.right.shape[1], 1).mT)
    cancelled = (terms.sum(-1) / entries)[entries > 0].max() if entries.any() else 1
    assert certificate.error <= 2 * sum_bound(torch.float32, k + found.left.shape[3] + 20) * cancelled


def test_a_long_map_takes_memory_of_its_length_and_satisfies_its_identity():
    torch.manual_seed(0)
    q, k, v, g = torch.randn(4, 1, 1, 4096, 16)
    found = AttributionMap(AttentionMap(q, k, Causal()), g, v)
    assert found.nbytes < 4 * 4096 * 16 * 4 + 2**17
    certificate = found.certificate()
    assert certificate.rows == 4096
    assert certificate.error <= 2 * sum_bound(torch.float32, 4096 + 16 + 20)


@pytest.mark.slow
def test_at_65536_tokens_rows_add_up_to_gradient_times_context_and_rows_and_columns_to_the_same():
    torch.manual_seed(0)
    t, e = 65536, 16
    q, k, v, g = torch.randn(4, 1, 1, t, e)
    weights = AttentionMap(q, k, Causal())
    found = AttributionMap(weights, g, v)
    overview, context = found.overview(1), weights @ v
    size = (g.abs() * (weights @ v.abs())).sum(-1)  # at least Σ_j A_ij |g_i · v_j|
    bound = 2 * sum_bound(torch.float32, t + 2 * e + 20) * size
    assert ((overview.row_sums - (g * context).sum(-1)).abs() <= bound).all()
    assert (overview.row_sums.double().sum() - overview.column_sums.double().sum()).abs() <= bound.double().sum()
    assert torch.allclose(found[0, 0, -1].sum(), overview.row_sums[0, 0, -1], rtol=0, atol=float(bound[0, 0, -1]))
    assert found.nbytes < 4 * t * e * 4 + 2**20


@pytest.mark.parametrize(
    ("left", "right"),
    [((1, 2, 5, 3), (1, 2, 6, 4)), ((1, 2, 4, 3), (1, 2, 6, 3)), ((1, 2, 5, 3), (1, 3, 6, 3)), ((2, 5, 3), (1, 2, 6, 3))],
)
def test_shapes_that_do_not_fit_are_refused(left, right):
    weights = AttentionMap(torch.randn(1, 2, 5, 3), torch.randn(1, 2, 6, 3))
    with pytest.raises(ShapeError, match=r"left|right"):
        AttributionMap(weights, torch.randn(left), torch.randn(right))


@pytest.mark.parametrize("number", [-1e9, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("factor", ["one", "weights", "cut"])
def test_a_number_in_the_bias_that_hides_a_key_hides_it_as_minus_infinity_does(factor, dtype, number):
    generator = torch.Generator().manual_seed(3)
    q, left = torch.randn(2, 2, 3, 11, 5, dtype=dtype, generator=generator)
    k, v = torch.randn(2, 2, 1, 13, 5, dtype=dtype, generator=generator)
    hidden = torch.rand(2, 3, 11, 13, generator=generator) < 0.5
    hidden[..., 0] = False
    found, expected = (
        AttributionMap(
            AttentionMap(q, k, bias=torch.zeros(2, 3, 11, 13, dtype=dtype).masked_fill(hidden, one)), left, v, factor=factor
        )
        for one in (number, -torch.inf)
    )
    places = torch.meshgrid(*map(torch.arange, found.shape), indexing="ij")
    assert torch.equal(found.is_visible(*places), ~hidden)
    assert torch.equal(found.dense(), expected.dense())
    assert torch.equal(found.overview().largest, expected.overview().largest)
    assert torch.equal(found.pooled(3, 4, "max"), expected.pooled(3, 4, "max"))
