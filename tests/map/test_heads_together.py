"""Several heads in one compiled pass: each as alone, with its own memory, and on all threads."""

import math
import threading

import pytest
import torch

from regard import AttentionMap, Causal, Padding
from regard.map import compiled_passes, passes
from regard.map.plane import Plane
from regard.map.pooling import bin_edges
from regard.mechanism.request import make_request

pytest.importorskip("numba", reason="the compiled pass needs numba, which is not installed")

from regard.map.compiled import traversals  # needs numba

HEADS, BAD, T = 5, 1, 400  # not small matrices, which go through another pass
OTHERS = [head for head in range(HEADS) if head != BAD]
FUNCTIONS = {
    "top": lambda m: m.top(5),
    "overview": lambda m: tuple(vars(m.overview()).values()),
    "entropy": lambda m: (m.entropy(),),
    "logsumexp": lambda m: (m.logsumexp(),),
    "received": lambda m: (m.received(),),
    "pooled": lambda m: (m.pooled(7, 9),),
}


def make_inputs():
    """Queries and keys of some heads, and the queries with a NaN in one head."""
    torch.manual_seed(4)
    q, k = torch.randn(2, 1, HEADS, T, 16)
    wrong = q.clone()
    wrong[0, BAD, 9, 3] = math.nan
    return q, k, wrong


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_a_nan_sends_only_its_own_head_through_the_plain_pass(name, monkeypatch):
    q, k, wrong = make_inputs()
    expected = FUNCTIONS[name](AttentionMap(q, k, Causal()))
    plain = FUNCTIONS[name](AttentionMap(wrong[:, [BAD]].double(), k[:, [BAD]].double(), Causal()))
    taken, compiled = [], []
    run_batch = compiled_passes.run_batch
    monkeypatch.setattr(
        compiled_passes,
        "run_batch",
        lambda planes, *rest, **rows: compiled.append(len(planes)) or run_batch(planes, *rest, **rows),
    )
    for function in ("find_top", "gather_with_picture"):
        original = getattr(passes, function)
        monkeypatch.setattr(passes, function, lambda plane, *rest, call=original: taken.append(plane.h) or call(plane, *rest))
    found = FUNCTIONS[name](AttentionMap(wrong, k, Causal()))
    assert (taken, compiled) == ([BAD], [HEADS])
    for x, y, exact in zip(found, expected, plain, strict=True):
        assert torch.equal(x[:, OTHERS], y[:, OTHERS])
        assert torch.equal(x[:, BAD].isnan(), exact[:, 0].isnan())


@pytest.mark.parametrize(("rows", "heads"), [(16, 2), (3, 4), (2, 5), (1, 16), (40, 1)])
def test_groups_of_heads_that_share_a_plan_take_all_threads(rows, heads, monkeypatch):
    threads = 8
    together = threading.Barrier(threads)
    monkeypatch.setattr(traversals, "overview", lambda *_: together.wait(timeout=20))
    q = torch.randn(rows, heads, T, 4)
    request = make_request(q, q, q, Causal() & Padding([T - row for row in range(rows)]))
    every = [Plane(request, b, h) for b in range(rows) for h in range(heads)]
    compiled_passes.gather_statistics(every, threads, bin_edges(0, T, 9), bin_edges(0, T, 9))


@pytest.mark.parametrize("threads", [2, 3, 8])
@pytest.mark.parametrize(("rows", "heads"), [(4, 2), (3, 4), (9, 1)])
def test_groups_in_parallel_give_the_bits_of_one_thread(rows, heads, threads):
    torch.manual_seed(5)
    q, k = torch.randn(2, rows, heads, T, 8)
    request = make_request(q, k, k, Causal() & Padding([T - 7 * row for row in range(rows)]))
    every = [Plane(request, b, h) for b in range(rows) for h in range(heads)]
    bins = bin_edges(0, T, 9), bin_edges(0, T, 11)
    (found, picture, _), (expected, other, _) = (compiled_passes.gather_statistics(every, n, *bins) for n in (threads, 1))
    assert all(torch.equal(found.rows[name], x) for name, x in expected.rows.items())
    assert torch.equal(found.received, expected.received)
    assert torch.equal(picture.sum, other.sum)
    assert torch.equal(picture.max, other.max)
