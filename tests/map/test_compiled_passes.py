"""The compiled pass against the plain one, and both against float64."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bounds import assert_within
from map.map_bounds import assert_pictures_within, assert_rows_within, plane_bounds
from regard import AttentionMap, Causal, Documents, Everything, Given, Padding, Prefix, Window
from regard.map import compiled_passes, pass_inputs, pass_runner, passes, plane
from regard.map.plane import Plane
from regard.map.pooling import BinnedWeights, bin_edges
from regard.mechanism.request import make_request
from run_limits import limit_examples
from strategies import requests

pytest.importorskip("numba", reason="the compiled pass needs numba, which is not installed")

T, K, D = 401, 1327, 16  # more than one stretch of keys
RULES = [
    Everything(),
    Causal(),
    Causal() & Window(40),
    Window(100, 20),
    Causal() & (Window(16) | Prefix(2)),
    Documents(torch.arange(K) // 37),
    Padding([1133]),
    ~Everything(),
]
SLOPES = torch.linspace(-3, 0, K).masked_fill(torch.arange(K) % 11 == 3, -math.inf)
OPTIONS = [
    {},
    {"softcap": 3.0, "scale": 0.7},
    {"sinks": torch.tensor([0.7])},
    {"offset": 901},
    {"offset": -30, "sinks": torch.tensor([-0.7])},
    {"bias": torch.linspace(-9, 9, T * K).view(T, K).sin()},
    {"bias": SLOPES, "softcap": 30.0},
    {"bias": SLOPES[:T].view(T, 1), "offset": 700},
]


def planes(mask, **options):
    """One plane in float32 and in float64."""
    torch.manual_seed(1)
    q, k = torch.randn(1, 1, T, D), torch.randn(1, 1, K, D)
    raised = {n: o.double() if torch.is_tensor(o) else o for n, o in options.items()}
    return [Plane(make_request(a, b, b, mask, **o), 0, 0) for a, b, o in ((q, k, options), (q.double(), k.double(), raised))]


def gather_statistics(plane, threads, rows, columns):
    """The statistics and the picture of one plane."""
    found, pictures, wrong = compiled_passes.gather_statistics([plane], threads, rows, columns)
    return None if wrong else (found[0], pictures[0])


def find_top(plane, threads, n):
    """The largest weights of one plane, and their keys."""
    values, keys, wrong = compiled_passes.find_top([plane], threads, n)
    return None if wrong else (values[0], keys[0])


@pytest.mark.slow
@pytest.mark.emulated
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: " ".join(options))
@pytest.mark.parametrize("mask", RULES, ids=repr)
def test_the_compiled_pass_finds_what_the_plain_one_finds_in_float64(mask, options):
    single, double = planes(mask, **options)
    assert compiled_passes.can_run_compiled(single)
    bins = bins_of_all()
    found, picture = gather_statistics(single, 2, *bins)
    reference = BinnedWeights(double, *bins)
    expected = passes.gather_statistics(double, passes.ROWS, [reference.add_run])
    assert set(found.rows) == set(passes.ROWS)
    allowed = plane_bounds(double)
    assert_rows_within(found, expected, allowed, double.offset)
    assert_within(found.received, expected.received, allowed.received, "received")
    assert_pictures_within(picture, reference, allowed, double)


@pytest.mark.slow
@pytest.mark.emulated
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: " ".join(options))
@pytest.mark.parametrize("mask", RULES, ids=repr)
def test_what_is_made_of_the_blocks_is_what_the_plain_passes_make_in_float64(mask, options):
    single, double = planes(mask, **options)
    allowed = plane_bounds(double)
    weights = allowed.exact
    assert_top_within(*find_top(single, 2, 9), allowed, 9)
    assert_products_within(single, 2, torch.randn(K, 45), torch.randn(T, 37), allowed)
    assert_products_within(single, 2, torch.randn(K, 1), torch.randn(T, 5), allowed)
    bins = bin_edges(101, 340, 53), bin_edges(77, 1260, 29)
    below, reference = (
        gather_statistics(single, 2, *bins_of_all())[0].denominators,
        BinnedWeights(double, *bins),
    )
    found = compiled_passes.draw_picture(single, 2, below, *bins)
    reference.add(torch.arange(T), torch.arange(K), weights)
    assert_pictures_within(found, reference, allowed, double)


def assert_products_within(plane, threads, v, r, allowed):
    """A v, Aᵀ r, and the denominators, the same from both."""
    weights = allowed.exact
    found, below = compiled_passes.apply_weights(plane, threads, v)
    assert_within(found, weights @ v.double(), allowed.product_bounds(v))
    found, again = compiled_passes.apply_transposed_weights(plane, threads, r)
    assert_within(found, weights.T @ r.double(), allowed.transpose_product_bounds(r))
    assert torch.equal(below.shift, again.shift)
    assert torch.equal(below.total, again.total)


def assert_top_within(values, keys, allowed, n):
    """The n largest weights of each row, largest first, each on a key of its own that has it."""
    assert_within(values, allowed.exact.topk(n).values, allowed.largest.unsqueeze(-1), "the largest")
    assert_within(values, allowed.exact.gather(1, keys), allowed.weights.gather(1, keys), "on their keys")
    assert all(len(row) == n for row in map(set, keys.tolist()))


@pytest.mark.parametrize("size", [(1, 1), (3, K), (1000, 5)])
def test_bins_may_be_larger_than_what_a_thread_takes_or_smaller_than_a_row(size):
    single, double = planes(Causal(), offset=901)
    bins = bin_edges(0, T, size[0]), bin_edges(0, K, size[1])
    found, reference, allowed = (
        gather_statistics(single, 2, *bins)[1],
        BinnedWeights(double, *bins),
        plane_bounds(double),
    )
    reference.add(torch.arange(T), torch.arange(K), allowed.exact)
    assert_pictures_within(found, reference, allowed, double)


def bins_of_all():
    return bin_edges(0, T, 100), bin_edges(0, K, 256)


def double_of(asked, b, h=0):
    """The plane of a batch row and a head in float64."""
    options = {name: x.double() if torch.is_tensor(x) and x.is_floating_point() else x for name, x in asked.options.items()}
    return Plane(make_request(asked.q.double(), asked.k.double(), asked.v.double(), asked.mask, **options), b, h)


@settings(max_examples=limit_examples(50))
@given(requests(dtype=torch.float32), st.data())
def test_small_maps_of_every_kind_have_the_same_rows_and_products(asked, data):
    one = Plane(make_request(asked.q, asked.k, asked.v, asked.mask, **asked.options), 0, 0)
    if min(one.shape):
        allowed = plane_bounds(double_of(asked, 0))
        n = data.draw(st.integers(1, one.shape[1]))
        assert_top_within(*find_top(one, 1, n), allowed, n)
        assert_products_within(one, 1, torch.randn(one.shape[1], 3), torch.randn(one.shape[0], 3), allowed)


@settings(max_examples=limit_examples(50))
@given(requests(dtype=torch.float32))
def test_small_maps_of_every_kind_agree_too(asked):
    for b in range(asked.q.shape[0]):
        one, double = Plane(make_request(asked.q, asked.k, asked.v, asked.mask, **asked.options), b, 0), double_of(asked, b)
        if min(one.shape):
            found, expected = (
                gather_statistics(one, 1, *(bin_edges(0, n, n) for n in one.shape))[0],
                passes.gather_statistics(double, passes.ROWS),
            )
            allowed = plane_bounds(double)
            assert_rows_within(found, expected, allowed, double.offset)
            assert_within(found.received, expected.received, allowed.received)


B, H, G = 3, 6, 2
BATCHES = {
    "causal": lambda: {"mask": Causal()},
    "offsets": lambda: {"mask": Causal(), "offset": torch.tensor([0, 30, -7])},
    "padding": lambda: {"mask": Causal() & Padding([61, 83, 40]), "sinks": torch.linspace(-1, 2, H)},
    "tables of heads": lambda: {"mask": Given(torch.rand(1, H, 67, 83) < 0.6)},
    "tables": lambda: {"mask": Given(torch.rand(B, H, 67, 83) < 0.6), "softcap": 3.0},
    "a bias of heads": lambda: {"mask": Causal(), "bias": torch.randn(1, H, 67, 83)},
    "a bias of all": lambda: {"mask": Window(9, 20), "bias": torch.randn(67, 83), "scale": -0.4},
    "a bias of rows": lambda: {"mask": Everything(), "bias": torch.randn(B, 1, 1, 83)},
}


@pytest.mark.parametrize("count", [3, 17])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", sorted(BATCHES))
def test_planes_together_give_the_bits_of_each_alone(name, threads, count, monkeypatch):
    monkeypatch.setattr(pass_runner, "SMALL", 0)  # several threads, and several for each of a few planes
    torch.manual_seed(2)
    q, k = torch.randn(B, 67, H, D).transpose(1, 2), torch.randn(B, G, 83, D)
    request = make_request(q, k, k, **BATCHES[name]())
    several = [Plane(request, b, h) for b in range(B) for h in range(H)][-count:]
    bins = bin_edges(0, 67, 29), bin_edges(0, 83, 31)
    found, pictures, wrong = compiled_passes.gather_statistics(several, threads, *bins)
    again, means, largest, also_wrong = compiled_passes.gather_overview(several, threads, *bins)
    values, keys, wrong_rows = compiled_passes.find_top(several, threads, 5)
    assert wrong == also_wrong == wrong_rows == []
    assert torch.equal(means, pictures.pool("mean"))
    assert torch.equal(largest, pictures.max)
    for n, one in enumerate(several):
        own = threads if count < 4 * threads else 1
        alone, picture = gather_statistics(one, own, *bins)
        for rows in (found[n], again[n]):
            assert all(torch.equal(rows.rows[key], x) for key, x in alone.rows.items())
            assert torch.equal(rows.received, alone.received)
            assert torch.equal(rows.denominators.shift, alone.denominators.shift)
            assert torch.equal(rows.denominators.total, alone.denominators.total)
        assert torch.equal(pictures[n].sum, picture.sum)
        assert torch.equal(pictures[n].max, picture.max)
        assert all(torch.equal(x[n], y) for x, y in zip((values, keys), find_top(one, own, 5), strict=True))


@pytest.mark.parametrize("where", ["q", "k"])
def test_nan_and_infinity_go_the_plain_way_and_come_out(where):
    q, k = torch.randn(2, 1, 1, 50, 8)
    {"q": q, "k": k}[where][0, 0, 7, 3] = math.nan
    seen = AttentionMap(q, k, Causal()).overview()
    rows = seen.entropy[0, 0].isnan().nonzero().flatten().tolist()
    assert rows == ([7] if where == "q" else list(range(7, 50)))


@pytest.mark.slow
@pytest.mark.emulated
def test_the_compiled_pass_scores_only_what_a_block_of_rows_may_see():
    from numba import njit

    from regard.map.compiled import blocks

    split_keys, q = njit(blocks.split_keys.py_func), torch.zeros(1, 1, 2048, 4)
    for mask, most in ((Window(64, 0), 2048 * (64 + 16 + 64)), (Causal(), 0.51 * 2048**2)):
        single = Plane(make_request(q, q, q, mask), 0, 0)
        (plan,) = pass_inputs.make_plans(single)
        keys, scored = np.zeros((plan.chunks, 3), np.int64), 0
        for _, run, start, stop in pass_inputs.make_blocks(plan, np.array([0, 2048])):
            count = split_keys(plan, run, start, stop, keys)
            scored += (stop - start) * keys[:count, 2].sum()
        assert scored < most


@pytest.mark.parametrize("function", ["find_top", "apply_weights", "apply_transposed_weights", "draw_picture"])
def test_a_nan_anywhere_is_left_to_the_plain_passes(function):
    """In the keys, in the bias; infinite scores too, whose softmax has none."""
    for where in ("q", "k", "bias", "infinite"):
        q, k, bias = torch.randn(1, 1, 50, 8), torch.randn(1, 1, 50, 8), torch.zeros(50, 50)
        if where == "infinite":
            q[0, 0, 7], k[0, 0, 3] = 1e30, 1e30
        else:
            {"q": q[0, 0], "k": k[0, 0], "bias": bias}[where][7, 3] = math.nan
        single = Plane(make_request(q, k, k, Causal(), bias=bias), 0, 0)
        bins = bin_edges(0, 50, 5), bin_edges(0, 50, 5)
        assert gather_statistics(single, 1, *bins) is None
        below = passes.gather_statistics(single, {}).denominators
        rest = {
            "find_top": (3,),
            "apply_weights": (torch.ones(50, 2),),
            "apply_transposed_weights": (torch.ones(50, 2),),
            "draw_picture": (below, *bins),
        }
        of_one = find_top if function == "find_top" else getattr(compiled_passes, function)
        assert of_one(single, 1, *rest[function]) is None


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of a process is read from Linux's /proc")
def test_a_long_map_is_overseen_in_bounded_memory():
    from benchmarks.timing import measure_peak_megabytes

    q = torch.randn(1, 1, 65_536, 64)
    found = AttentionMap(q, q, Window(256, 0))
    assert measure_peak_megabytes(found.overview) < 200
    assert measure_peak_megabytes(lambda: AttentionMap(q, q, Window(256, 0)).top(4)) < 200
    assert plane.BLOCK_NUMBERS * 4 == 2**24  # what the documentation says of a block
