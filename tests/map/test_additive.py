"""Maps of additive scores, by every question there is, against the matrix written out in float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bounds import assert_within
from map.map_bounds import additive_score_error, map_bounds
from regard import AttentionMap, Causal, ConfigError, Given, Padding, ShapeError, Window
from regard.map import Pyramid, additive, plane
from regard.mechanism.additive import attend_additive
from regard.mechanism.heads import share
from regard.mechanism.request import make_request
from regard.mechanism.scores import additive as scored
from regard.mechanism.steps import compute_steps_from_scores
from run_limits import limit_examples
from skips import NEEDS_LOOPS
from strategies import requests

B, H, G, Q, K, D, E = 2, 6, 3, 47, 53, 11, 13


@pytest.fixture(autouse=True)
def block_sizes(monkeypatch):
    """Blocks small enough for every traversal, and every block of scores, to have many."""
    monkeypatch.setattr(plane, "BLOCK_NUMBERS", 7 * K)
    monkeypatch.setattr(plane, "ALIGNED", 8)
    monkeypatch.setattr(plane, "GAP", 4)
    monkeypatch.setattr(additive, "BLOCK_TANHS", 5 * D)


def close(found, expected, atol=1e-12):
    torch.testing.assert_close(found, torch.as_tensor(expected), rtol=0, atol=atol)


def tensors(dtype=torch.float64, q=Q, k=K, d=D):
    torch.manual_seed(1)
    return [torch.randn(*shape).to(dtype) for shape in ((B, H, q, d), (B, G, k, d), (d,))]


def steps_of(asked, weight):
    """The steps of additive attention with every setting that attention has."""
    options = {"scale": 1.0, **asked.options}
    request = make_request(asked.q, asked.k, asked.k, asked.mask, **options)
    return compute_steps_from_scores(scored(asked.q, share(asked.k, asked.q.shape[1]), weight), request)


def compute_weights(q, k, weight, seen):
    """The matrix by the formula, number by number; `seen` broadcasts to it."""
    found = torch.zeros(B, H, q.shape[2], k.shape[2], dtype=torch.float64)
    seen = seen.expand(found.shape)
    for b in range(B):
        for h in range(H):
            for i in range(q.shape[2]):
                there = seen[b, h, i].nonzero().flatten().tolist()
                e = [float((weight * (q[b, h, i] + k[b, h * G // H, j]).tanh()).sum()) for j in there]
                total = sum(map(math.exp, e))
                for j, one in zip(there, e, strict=True):
                    found[b, h, i, j] = math.exp(one) / total
    return found


@pytest.mark.parametrize("mask", [Padding([53, 9]), Causal(), Given(torch.arange(Q * K).view(Q, K) % 3 > 0)], ids=repr)
def test_the_map_is_the_formula_number_by_number(mask):
    q, k, weight = tensors()
    q = q[:, :, :9]
    mask = Given(mask.given[:, :, :9]) if isinstance(mask, Given) else mask
    expected = compute_weights(q, k, weight, mask.table(9, K))
    close(AttentionMap(q, k, mask, weight=weight).dense(), expected)
    close(attend_additive(q, k, k, weight, mask).weights, expected)


@pytest.mark.slow
@settings(max_examples=limit_examples(100))
@given(requests(), st.data())
def test_every_answer_is_that_of_the_matrix(asked, data):
    weight = torch.randn(asked.q.shape[3], dtype=torch.float64)
    steps = steps_of(asked, weight)
    weights, (b, h, q, k) = steps.weights, steps.weights.shape
    found = AttentionMap(asked.q, asked.k, asked.mask, weight=weight, **asked.options)
    assert found.shape == weights.shape
    close(found[...], weights)
    close(found.dense(), weights)
    logarithm = weights.log().masked_fill(weights == 0, 0)
    close(found.entropy(), -(weights * logarithm).sum(-1), atol=1e-11)
    close(found.received(), weights.sum(-2))
    half = torch.arange(k) % 2 == 0
    close(found.mass(half), weights[..., half].sum(-1))
    close(found.mass(slice(1, None)), weights[..., 1:].sum(-1))
    back = data.draw(st.integers(-3, 3))
    starts = asked.options.get("offset", 0)
    starts = torch.as_tensor(starts).expand(b).tolist()
    targets = [[i + starts[n] - back for i in range(q)] for n in range(b)]
    diagonal = [
        [[weights[n, m, i, j] if 0 <= j < k else 0.0 for i, j in enumerate(targets[n])] for m in range(h)] for n in range(b)
    ]
    close(found.diagonal(back), torch.tensor(diagonal, dtype=torch.float64))
    if k:
        values, keys = found.top(min(3, k))
        close(values, weights.topk(min(3, k)).values)
        close(weights.gather(-1, keys), values)
    v, r = torch.randn(b, 1, k, E, dtype=torch.float64), torch.randn(b, h, q, E, dtype=torch.float64)
    close(found @ v, weights @ v)
    close(found.mT @ r, weights.mT @ r)
    rows, columns = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
    for how in ("mean", "max", "sum"):
        close(found.pooled(rows, columns, how), pool_weights(weights, rows, columns, how))
    masked = steps.masked
    if "sinks" in asked.options:
        masked = torch.cat([masked, asked.options["sinks"].view(-1, 1, 1).expand(b, h, q, 1)], -1)
    expected = masked.logsumexp(-1) if masked.shape[-1] else torch.full((b, h, q), -math.inf, dtype=torch.float64)
    close(found.logsumexp(), expected)
    assert found.certificate(q).error < 1e-12


def pool_weights(weights, rows, columns, how):
    """The picture of a matrix, bin by bin."""
    q, k = weights.shape[2:]
    found = weights.new_zeros(*weights.shape[:2], rows, columns)
    for r in range(rows):
        for c in range(columns):
            part = weights[..., r * q // rows : (r + 1) * q // rows, c * k // columns : (c + 1) * k // columns]
            if part.numel():
                found[..., r, c] = {"mean": part.mean, "sum": part.sum, "max": part.amax}[how]((-1, -2))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("mask", [Padding([K, 9]), Causal() & Window(20)], ids=repr)
def test_an_overview_a_tile_and_a_pyramid_are_those_of_the_matrix(mask):
    q, k, weight = tensors()
    found, weights = AttentionMap(q, k, mask, weight=weight), attend_additive(q, k, k, weight, mask).weights
    seen = found.overview()
    close(seen.largest, weights.amax(-1))
    close(seen.first, weights[..., 0])
    close(seen.itself, weights.diagonal(dim1=-2, dim2=-1))
    close(seen.distance, (weights * (torch.arange(Q).unsqueeze(-1) - torch.arange(K))).sum(-1), atol=1e-11)
    close(seen.mean, weights)
    close(found.tile(slice(5, 29), slice(3, 50), (4, 7)), pool_weights(weights[..., 5:29, 3:50], 4, 7, "mean"))
    one = Pyramid(found, 1, 2)
    close(one.tile(0, 0, 0), weights[1, 2])
    close(one.received, weights[1, 2].sum(0))
    i, j = torch.arange(40) % Q, torch.arange(40) * 7 % K
    close(found[1, 2, i, j], weights[1, 2, i, j])
    close(found.select(batch=1, heads=[4, 2]).dense(), weights[1:, [4, 2]])


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [pytest.param(True, marks=NEEDS_LOOPS), False])
@pytest.mark.parametrize("d", [1, 16, 64, 257])
def test_single_precision_is_within_its_bounds_by_either_way(d, compiled, monkeypatch):
    q, k, weight = tensors(torch.float32, d=d)
    mask = Causal() & Window(40)
    double = AttentionMap(q.double(), k.double(), mask, weight=weight.double())
    allowed, logsumexp, received = map_bounds(double), double.logsumexp(), double.received()
    monkeypatch.setattr(additive.additive, "can_use_loops", lambda *_: compiled)
    calls = []
    call = additive.additive.launch_loops
    monkeypatch.setattr(additive.additive, "launch_loops", lambda *args, **arrays: calls.append(args) or call(*args, **arrays))
    found = AttentionMap(q, k, mask, weight=weight).overview()
    assert bool(calls) == compiled
    assert_within(found.mean, allowed.exact, allowed.weights)
    assert_within(found.logsumexp, logsumexp, allowed.row_statistics(logsumexp)["logsumexp"])
    assert_within(found.received, received, allowed.received)


@pytest.mark.slow
@NEEDS_LOOPS
def test_many_scores_are_computed_on_several_threads_and_are_the_same(monkeypatch):
    q, k, weight = tensors(torch.float32)
    one = additive.scores(q[0, 0], k[0, 0], weight)
    monkeypatch.setattr(additive, "SINGLE_THREAD_LIMIT", 0)
    monkeypatch.setattr(additive.additive, "can_use_loops", lambda *_: True)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    allowed = 2 * additive_score_error(weight)
    assert_within(additive.scores(q[0, 0], k[0, 0], weight), one, allowed)
    assert_within(additive.scores(q[0, 0, :2], k[0, 0], weight), one[:2], allowed)  # fewer queries than threads


@pytest.mark.slow
def test_a_nan_stays_in_the_rows_that_it_is_in():
    for quick in (8, 2**16):  # numbers; those in the second go through the compiled loops
        q, k, weight = torch.randn(1, 1, quick // 8, 8), torch.randn(1, 1, 9, 8), torch.randn(8)
        q[0, 0, 0, 3] = math.nan
        found = AttentionMap(q, k, weight=weight).overview()
        assert found.entropy.isnan().sum() == 1
        k[0, 0, 7, 3] = math.nan
        assert AttentionMap(q[:, :, 1:] if quick > 8 else q, k, weight=weight).entropy().isnan().all()


def test_its_map_takes_part_in_gradients_of_the_values():
    q, k, weight = tensors()
    found = AttentionMap(q, k, Causal(), weight=weight)
    v = torch.randn(B, G, K, E, dtype=torch.float64, requires_grad=True)
    (found @ v).square().sum().backward()
    given, v.grad = v.grad, None
    (attend_additive(q, k, v, weight, Causal()).context).square().sum().backward()
    close(given, v.grad)


def test_a_weight_that_does_not_fit_is_refused():
    q, k, weight = tensors(torch.float32)
    with pytest.raises(ShapeError, match=r"expected \(11,\), got \(10,\)"):
        AttentionMap(q, k, weight=weight[1:])
    with pytest.raises(ConfigError, match="got a list"):
        AttentionMap(q, k, weight=[1.0] * D)
    with pytest.raises(ConfigError, match="int64"):
        AttentionMap(q, k, weight=torch.arange(D))


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [True, False])
def test_a_long_map_never_has_the_block_of_queries_keys_and_numbers(compiled, monkeypatch):
    from benchmarks.timing import measure_peak_megabytes

    monkeypatch.undo()
    q, k, weight = torch.randn(1, 1, 751, 256), torch.randn(1, 1, 20_011, 256), torch.randn(256)
    few = torch.arange(0, 751, 250)
    monkeypatch.setattr(additive.additive, "can_use_loops", lambda *_: compiled)
    found = AttentionMap(q, k, Padding([19_000]), weight=weight)
    asked = [lambda: found[0, 0, few], lambda: found[0, 0, 7, 9:14], lambda: found[0, 0, few, few + 3]]
    asked += [lambda: additive.scores(q[0, 0, :40], k[0, 0], weight)]  # 3 MB
    assert max(measure_peak_megabytes(ask) for ask in asked) < 15  # a row of the block alone is 20 MB
    if compiled:
        assert measure_peak_megabytes(found.overview) < 1000  # some blocks of 16 MB; the block of all numbers is 15 GB
