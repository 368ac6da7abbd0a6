"""The compiled pass of an AttributionMap against the plain one in float64."""

import math
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bounds import assert_within, gamma, sum_bound
from map.map_bounds import map_bounds
from map.test_compiled_passes import OPTIONS, RULES
from regard import AttentionMap, Causal
from regard.map import attribution_passes, compiled_passes
from regard.map.attribution_map import FACTORS, AttributionMap
from regard.map.pooling import SignedPicture, bin_edges
from strategies import requests

pytest.importorskip("numba", reason="the compiled pass needs numba, which is not installed")

T, K, D, E = 401, 1327, 16, 11  # more than one chunk of keys
FEW = {"rows": bin_edges(0, T, 100), "columns": bin_edges(0, K, 256)}


def make_maps(q, k, left, right, mask, factor, options) -> list[AttributionMap]:
    """One map in float32 and in float64."""
    found = []
    for dtype in (torch.float32, torch.float64):
        raised = {n: o.to(dtype) if torch.is_tensor(o) and o.is_floating_point() else o for n, o in options.items()}
        weights = AttentionMap(q.to(dtype), k.to(dtype), mask, **raised)
        found.append(AttributionMap(weights, left.to(dtype), right.to(dtype), factor=factor))
    return found


def entry_bounds(exact: AttributionMap) -> Tensor:
    """How far each entry in float32 may be off, given the map in float64: from the weights, the products and their means."""
    allowed = map_bounds(exact.weights)
    w, off = allowed.exact, allowed.weights
    right = exact.right.repeat_interleave(exact.shape[1] // exact.right.shape[1], 1)
    p, size = exact.left @ right.mT, exact.left.abs() @ right.abs().mT
    of_products = sum_bound(torch.float32, right.shape[3]) * size
    if exact.factor == "one":
        return of_products
    if exact.factor == "weights":
        return off * (p.abs() + of_products) + w * of_products + sum_bound(torch.float32, 3) * (w * p).abs()
    context = (exact.left.abs() * allowed.product_bounds(right)).sum(-1, keepdim=True)
    of_means = context + sum_bound(torch.float32, right.shape[3]) * (w * size).sum(-1, keepdim=True)
    m = (w * p).sum(-1, keepdim=True)
    is_only = is_nearly_one(w, 1e-9)  # whose entry is -p
    left_over = (1 - w).where(~is_only, 1)
    assert ((left_over > 2 * off) | is_only).all()
    ratio = off / (left_over * (left_over - off))
    of_ratio = ratio * (p - m).abs() + (w / left_over + ratio) * (of_products + of_means)
    return of_products.where(is_only, of_ratio + sum_bound(torch.float32, 5) * (w / left_over * (p - m)).abs())


def is_nearly_one(weights: Tensor, distance: float) -> Tensor:
    return weights > 1 - distance


def assert_statistics_within(found, exact: AttributionMap, expected, places: tuple[int, int]) -> None:
    """The sums, the extremes and the pictures of one matrix; the bounds are those of its entries, pooled as these are."""
    matrix, off = exact.dense()[places], entry_bounds(exact)[places]
    q, k = matrix.shape
    share = off + 2 * gamma(torch.float32, q + k) * matrix.abs()
    assert_within(found.row_sums, expected.row_sums, share.sum(1), "rows")
    assert_within(found.column_sums, expected.column_sums, share.sum(0), "columns")
    assert_within(found.largest.abs(), expected.largest.abs(), off.amax(1), "largest")
    nearest = ((matrix - found.largest.double().unsqueeze(-1)).abs() - off).amin(1)
    assert (nearest.where(found.largest != 0, 0) <= 0).all(), "the largest entry is none of its row"
    rows, columns = expected.picture.numbers.rows, expected.picture.numbers.columns
    for how, each in (("mean", share), ("sum", share), ("max", off)):
        allowed = SignedPicture.allocate(rows, columns, torch.float64)
        allowed.numbers.add(torch.arange(q), torch.arange(k), each)
        assert_within(found.picture.numbers.pool(how), expected.picture.numbers.pool(how), allowed.numbers.pool(how), how)
    assert_within(found.picture.negatives.max, expected.picture.negatives.max, allowed.numbers.max, "smallest")


def compare_passes(single: AttributionMap, exact: AttributionMap, threads: int, rows: Tensor, columns: Tensor) -> None:
    """Assert that the compiled pass in float32 finds in each head what the plain one finds in float64."""
    for head in product(*map(range, exact.shape[:2])):
        plane, products = single.get_plane(*head)
        found = compiled_passes.gather_entries(plane, threads, products, rows, columns)
        expected = attribution_passes.gather_entries(*exact.get_plane(*head), rows, columns)
        assert_statistics_within(found, exact, expected, head)


@pytest.mark.slow
@pytest.mark.emulated
@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: " ".join(options))
@pytest.mark.parametrize("mask", RULES, ids=repr)
def test_the_compiled_pass_finds_what_the_plain_one_finds_in_float64(mask, options, factor):
    torch.manual_seed(1)
    shapes = ((1, 1, T, D), (1, 1, K, D), (1, 1, T, E), (1, 1, K, E))
    single, exact = make_maps(*(torch.randn(shape) for shape in shapes), mask, factor, options)
    compare_passes(single, exact, 2, **FEW)


@pytest.mark.slow
@pytest.mark.emulated
@given(requests(dtype=torch.float32), st.sampled_from(list(FACTORS)), st.data())
def test_small_maps_of_every_kind_agree(asked, factor, data):
    (b, h, q, _), k = asked.q.shape, asked.k.shape[2]
    if not k:
        return
    left = torch.randn(b, h, q, asked.v.shape[3])
    single, exact = make_maps(asked.q, asked.k, left, asked.v, asked.mask, factor, asked.options)
    weights = exact.weights.dense()
    if factor == "cut" and (is_nearly_one(weights, 1e-3) & ~is_nearly_one(weights, 1e-9)).any():  # rounding is magnified
        single, exact = make_maps(asked.q, asked.k, left, asked.v, asked.mask, "weights", asked.options)
    bins = [data.draw(st.integers(1, size)) for size in (q, k)]
    compare_passes(single, exact, 1, *(bin_edges(0, size, n) for size, n in zip((q, k), bins, strict=True)))


@pytest.mark.slow
@pytest.mark.emulated
@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("rows", [(96, 131), (0, 1), (393, T)], ids=str)
@pytest.mark.parametrize("columns", [(0, 64), (517, 645), (1290, K)], ids=str)
def test_a_tile_of_some_rows_and_keys_is_the_plain_ones(factor, rows, columns):
    torch.manual_seed(3)
    shapes = ((1, 1, T, D), (1, 1, K, D), (1, 1, T, E), (1, 1, K, E))
    single, exact = make_maps(*(torch.randn(shape) for shape in shapes), Causal(), factor, {"offset": 901})
    compare_passes(single, exact, 2, bin_edges(*rows, min(7, rows[1] - rows[0])), bin_edges(*columns, 16))


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("where", ["q", "k", "left", "right"])
def test_a_nan_anywhere_goes_the_plain_way_and_comes_out(where, factor):
    given = dict(zip(("q", "k", "left", "right"), torch.randn(4, 1, 1, 50, 8), strict=True))
    given[where][0, 0, 7, 3] = math.nan
    found = AttributionMap(AttentionMap(given["q"], given["k"], Causal()), given["left"], given["right"], factor=factor)
    plane, products = found.get_plane(0, 0)
    bins = bin_edges(0, 50, 5), bin_edges(0, 50, 5)
    expected = attribution_passes.gather_entries(plane, products, *bins)
    quick = compiled_passes.gather_entries(plane, 1, products, *bins)
    hidden = factor == "one" and where in ("q", "k")  # the weights have no part in the products
    assert (quick is None) == (not hidden)
    assert expected.row_sums.isnan().any() == (not hidden)
    assert torch.equal(found.overview(5).row_sums[0, 0].isnan(), expected.row_sums.isnan())
