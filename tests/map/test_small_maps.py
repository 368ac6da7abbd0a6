"""Many small matrices go through one pass, whose answers are those of the passes over one matrix at a time."""

from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bounds import assert_within, attention_bounds
from map.map_bounds import map_bounds
from regard import AttentionMap, Causal, Everything, Given, Window, attend
from regard.compiled.threads import can_run_loops
from regard.map import compiled_passes, plane, small_maps

B, H, G, Q, K, D = 11, 6, 2, 7, 13, 5
MASKS = {
    "everything": lambda: Everything(),
    "causal": lambda: Causal(),
    "window": lambda: Causal() & Window(3),
    "a table of rows": lambda: Given(torch.rand(B, 1, Q, K) < 0.6),
    "a table of heads": lambda: Given(torch.rand(1, H, Q, K) < 0.6),
    "a table": lambda: Given(torch.rand(B, H, Q, K) < 0.3),  # with rows that see nothing
}


def one_by_one(m):
    """The same map, whose matrices are passed one by one."""
    return mock.patch.object(small_maps, "is_worth_batch", return_value=False)


def build(seed, mask, settings, dtype=torch.float64):
    torch.manual_seed(seed)
    q, k = torch.randn(B, H, Q, D, dtype=dtype), torch.randn(B, G, K, D, dtype=dtype)
    parts = {
        "softcap": 2.0,
        "bias": torch.randn(1, H, Q, K, dtype=dtype),
        "bias of keys": torch.randn(B, 1, 1, K, dtype=dtype),
        "sinks": torch.randn(H, dtype=dtype),
        "offset": 4,
        "offsets": torch.arange(B) % 5,
    }
    chosen = {name.split(" ")[0].replace("offsets", "offset"): parts[name] for name in settings}
    return {"q": q, "k": k, "mask": MASKS[mask](), "scale": 0.7, **chosen}


def list_answers(m):
    """Every answer of a map, by the question."""
    overview = vars(m.overview())
    few = torch.arange(K) % 3 == 1
    questions = {
        "dense": m.dense(),
        "logsumexp": m.logsumexp().nan_to_num(neginf=-1e3),
        "entropy": m.entropy(),
        "received": m.received(),
        "mass": m.mass(few),
        "mass of most": m.mass(slice(1, None)),
        "diagonal": m.diagonal(2),
        "top": m.top(3)[0],
        "some": m[3:5, :, 1],
        "product": m @ torch.eye(K, dtype=m.dense().dtype).expand(B, H, K, K),
        "transposed product": m.mT @ torch.eye(Q, dtype=m.dense().dtype).expand(B, H, Q, Q),
    }
    return {**questions, **{name: x.nan_to_num(neginf=-1e3) for name, x in overview.items()}}


@pytest.mark.slow
@pytest.mark.emulated
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(sorted(MASKS)),
    st.sets(st.sampled_from(["softcap", "bias", "sinks", "offset"])) | st.just({"bias of keys", "offsets"}),
)
def test_every_answer_is_that_of_the_matrices_one_by_one(seed, mask, settings):
    parts = build(seed, mask, settings)
    ours = list_answers(AttentionMap(**parts))
    with one_by_one(None):
        theirs = list_answers(AttentionMap(**parts))
    for name, found in ours.items():
        assert found.shape == theirs[name].shape, name
        assert torch.allclose(found, theirs[name], rtol=0, atol=1e-12), name


def test_float32_is_within_its_error_of_the_formula():
    parts = build(5, "causal", {"bias"}, torch.float32)
    exact = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in parts.items()}
    found = AttentionMap(**parts).dense()
    weights = attend(v=exact["k"], **exact).weights
    k = exact["k"].repeat_interleave(H // G, 1)
    bounds = attention_bounds(torch.float32, exact["q"], k, k, weights, scale=0.7, bias=exact["bias"])
    assert_within(found, weights, bounds.weights)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_map_of_half_precision_is_that_of_its_numbers_in_float32(dtype):
    parts = build(6, "causal", {"sinks"}, dtype)
    wide = {name: x.float() if isinstance(x, torch.Tensor) else x for name, x in parts.items()}
    found, expected = list_answers(AttentionMap(**parts)), list_answers(AttentionMap(**wide))
    for name, x in expected.items():
        assert torch.equal(found[name], x), name


@pytest.mark.skipif(not can_run_loops(), reason="the compiled pass over many matrices needs numba and torch's OpenMP")
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(sorted(MASKS)),
    st.sets(st.sampled_from(["softcap", "bias", "sinks", "offset"])) | st.just({"bias of keys"}),
)
def test_the_compiled_overview_of_many_matrices_is_within_its_error_of_float64s(seed, mask, settings):
    parts = build(seed, mask, settings, torch.float32)
    double = AttentionMap(
        **{name: x.double() if torch.is_tensor(x) and x.is_floating_point() else x for name, x in parts.items()}
    )
    allowed, expected = map_bounds(double), double.overview()
    with mock.patch.object(small_maps, "compute_rows", side_effect=AssertionError("the plain pass")):
        found = AttentionMap(**parts).overview()
    bounds = allowed.row_statistics(expected.logsumexp, parts.get("offset", 0))
    bounds |= {"received": allowed.received, "mean": allowed.weights, "max": allowed.weights}
    for name, x in vars(expected).items():
        assert_within(getattr(found, name), x, bounds[name], name)


@pytest.mark.slow
@pytest.mark.emulated
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("keys", [1, 15, 31, 32, 49, 65])
def test_the_compiled_overview_takes_rows_of_any_length(keys, threads):
    torch.manual_seed(0)
    q, k = torch.randn(64, 4, 49, D), torch.randn(64, 4, keys, D)
    double = AttentionMap(q.double(), k.double())
    allowed, expected = map_bounds(double), double.overview()
    usual = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with mock.patch.object(compiled_passes, "SMALL_BATCH", 0):
            found = AttentionMap(q, k).overview()
    finally:
        torch.set_num_threads(usual)
    assert_within(found.entropy, expected.entropy, allowed.row_statistics(expected.logsumexp)["entropy"])
    assert_within(found.mean, expected.mean, allowed.weights)
    assert_within(found.received, expected.received, allowed.received)


@pytest.mark.parametrize("threads", [1, 3])
def test_neither_the_layout_of_memory_nor_the_threads_change_a_bit(threads):
    parts = build(4, "a table of rows", {"bias of keys", "softcap", "sinks"}, torch.float32)
    expected = AttentionMap(**parts).overview()
    layouts = {
        "q": parts["q"].transpose(1, 2).contiguous().transpose(1, 2),  # (b, q, h, d)
        "k": torch.stack([parts["k"], parts["k"] + 1], -1)[..., 0],  # every other number
        "bias": parts["bias"].expand(B, H, Q, K).contiguous().mT.contiguous().mT,
    }
    usual = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with mock.patch.object(compiled_passes, "SMALL_BATCH", 0):
            m = AttentionMap(**{**parts, **layouts})
            found, dense = m.overview(), m.dense()
    finally:
        torch.set_num_threads(usual)
    assert torch.equal(dense, expected.mean)
    for name, x in vars(expected).items():
        assert torch.equal(getattr(found, name), x), name


def test_a_nan_goes_out_where_it_comes_in():
    parts = build(3, "everything", set())
    parts["q"][2, 1, 3, 0] = torch.nan
    found = AttentionMap(**parts)
    assert found.dense().isnan().nonzero()[:, :3].unique(dim=0).tolist() == [[2, 1, 3]]
    assert found.overview().entropy.isnan().nonzero().tolist() == [[2, 1, 3]]


@pytest.mark.parametrize("blocks", [1, 300, 10**6])
def test_the_size_of_a_block_changes_no_bit(blocks):
    parts = build(1, "window", {"bias", "sinks"})
    expected = AttentionMap(**parts).overview()
    with mock.patch.object(plane, "BLOCK_NUMBERS", blocks):
        found = AttentionMap(**parts).overview()
    for name, x in vars(found).items():
        assert torch.equal(x, getattr(expected, name)) or torch.allclose(x, getattr(expected, name), rtol=0, atol=1e-12), name
