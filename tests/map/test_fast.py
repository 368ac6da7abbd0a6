"""The compiled pass against the plain one, and both against float64."""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings

from regard import AttentionMap, Causal, Documents, Everything, Padding, Prefix, Window
from regard.map import fast, passes, plane
from regard.map.plane import Plane
from regard.map.pooling import Picture, edges
from regard.mechanism.request import ask
from strategies import requests

pytest.importorskip("numba", reason="the compiled pass needs numba, which is not installed")

T, D = 700, 16
RULES = [
    Everything(),
    Causal(),
    Causal() & Window(40),
    Window(100, 20),
    Causal() & (Window(16) | Prefix(2)),
    Documents(torch.arange(T) // 37),
    Padding([333]),
    ~Everything(),
]
OPTIONS = [{}, {"softcap": 3.0, "scale": 0.7}, {"sinks": torch.tensor([0.7])}, {"offset": -30}]
BUDGET = {"distance": 2e-6 * T * math.sqrt(T)}  # a sum of T positions; the others are of the order of one


def planes(mask, **options):
    """One plane in float32 and in float64."""
    torch.manual_seed(1)
    q, k = torch.randn(1, 1, T, D), torch.randn(1, 1, T, D)
    raised = {n: o.double() if torch.is_tensor(o) else o for n, o in options.items()}
    return [Plane(ask(a, b, b, mask, **o), 0, 0) for a, b, o in ((q, k, options), (q.double(), k.double(), raised))]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("mask", RULES, ids=repr)
def test_the_compiled_pass_finds_what_the_plain_one_finds_in_float64(mask, options):
    single, double = planes(mask, **options)
    assert fast.suits(single)
    bins = edges(0, T, 100), edges(0, T, 256)
    found, picture = fast.gather(single, *bins)
    reference = Picture(double, *bins)
    expected = passes.gather(double, passes.ROWS, [reference.watch])
    assert set(found.rows) == set(passes.ROWS)
    for name, values in expected.rows.items():
        torch.testing.assert_close(found.rows[name].double(), values, rtol=0, atol=BUDGET.get(name, 5e-6), msg=name)
    torch.testing.assert_close(found.received.double(), expected.received, rtol=2e-6 * math.sqrt(T), atol=1e-6)
    for how in ("mean", "max", "sum"):
        torch.testing.assert_close(
            picture.pooled(how).double(), reference.pooled(how), rtol=0, atol=3e-6 if how != "sum" else 1e-4
        )


@settings(max_examples=50)
@given(requests(dtype=torch.float32, kinds=("scale", "softcap", "sinks", "offset")))
def test_small_maps_of_every_kind_agree_too(asked):
    for b in range(asked.q.shape[0]):
        one = Plane(ask(asked.q, asked.k, asked.v, asked.mask, **asked.options), b, 0)
        if min(one.shape):
            found, expected = fast.gather(one, *(edges(0, n, n) for n in one.shape))[0], passes.gather(one, passes.ROWS)
            for name, values in expected.rows.items():
                torch.testing.assert_close(found.rows[name], values, rtol=1e-5, atol=1e-4)
            torch.testing.assert_close(found.received, expected.received, rtol=1e-5, atol=1e-5)


def test_scores_near_a_thousand_lose_nothing():
    torch.manual_seed(0)
    q, k = torch.randn(1, 1, 60, 16).round() * 20, torch.randn(1, 1, 80, 16).round() * 20
    found = AttentionMap(q, k).overview()
    exact = AttentionMap(q.double(), k.double()).overview()
    torch.testing.assert_close(found.largest.double(), exact.largest, rtol=0, atol=3e-6)
    torch.testing.assert_close(found.entropy.double(), exact.entropy, rtol=0, atol=1e-5)


@pytest.mark.parametrize("where", ["q", "k"])
def test_nan_and_infinity_go_the_plain_way_and_come_out(where):
    q, k = torch.randn(2, 1, 1, 50, 8)
    {"q": q, "k": k}[where][0, 0, 7, 3] = math.nan
    seen = AttentionMap(q, k, Causal()).overview()
    rows = seen.entropy[0, 0].isnan().nonzero().flatten().tolist()
    assert rows == ([7] if where == "q" else list(range(7, 50)))


def test_an_overview_takes_the_compiled_pass_where_it_can(monkeypatch):
    q = torch.randn(1, 1, 64, 8)
    taken = []
    gather = fast.gather
    monkeypatch.setattr(fast, "gather", lambda *args: taken.append(args) or gather(*args))
    AttentionMap(q, q, Causal()).overview()
    assert len(taken) == 1
    for other in (AttentionMap(q.double(), q.double()), AttentionMap(q, q, bias=torch.zeros(1))):
        other.overview()
    assert len(taken) == 1


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of a process is read from Linux's /proc")
def test_a_long_map_is_overseen_in_bounded_memory():
    from benchmarks.timing import peak_megabytes

    q = torch.randn(1, 1, 65_536, 64)
    found = AttentionMap(q, q, Window(256, 0))
    assert peak_megabytes(found.overview) < 200
    assert peak_megabytes(lambda: AttentionMap(q, q, Window(256, 0)).top(4)) < 200
    assert plane.BLOCK_NUMBERS * 4 == 2**24  # what the documentation says of a block
