"""Several heads in one compiled pass: each as alone, with its own memory, and on all threads."""

import math

import pytest
import torch

from regard import AttentionMap, Causal
from regard.map import compiled_passes, passes

pytest.importorskip("numba", reason="the compiled pass needs numba, which is not installed")

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


@pytest.mark.parametrize("heads", [1, HEADS])
@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_each_result_keeps_its_own_memory_alone(name, heads):
    q, k, _ = make_inputs()
    m = AttentionMap(q[:, :heads], k[:, :heads], Causal())
    found = FUNCTIONS[name](m)
    below = [x for h in range(heads) for x in vars(m.planes.get_denominators(next(p for p in m.planes if p.h == h))).values()]
    assert all(x.untyped_storage().nbytes() == x.nbytes for x in found)
    assert len({x.untyped_storage().data_ptr() for x in found}) == len(found)
    assert all(x.untyped_storage().nbytes() <= heads * x.nbytes for x in below)
