import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bounds import EXPONENTIAL, assert_within, entropy_bound, gamma
from map.map_bounds import map_bounds
from regard import (
    AttentionMap,
    Causal,
    ConfigError,
    Documents,
    Given,
    Padding,
    Prefix,
    ShapeError,
    TooLargeError,
    Window,
    attend,
)
from regard.map import plane
from run_limits import limit_examples
from strategies import requests

B, H, G, Q, K, D, E = 2, 6, 3, 300, 280, 11, 13
RULES = [
    Causal(),
    Causal() & Window(20),
    Documents(torch.arange(K) // 37),
    Padding([0, 250]),
    Causal() & (Window(9) | Prefix(2)),
]


def tensors(dtype=torch.float64):
    torch.manual_seed(1)
    return torch.randn(B, H, Q, D, dtype=dtype), torch.randn(B, G, K, D, dtype=dtype)


def both(mask=None, dtype=torch.float64, **options):
    """A map, and the same weights from attend."""
    q, k = tensors(dtype)
    mask = Causal() if mask is None else mask
    return AttentionMap(q, k, mask, **options), attend(q, k, k, mask, **options).weights


def close(found, expected, atol=1e-12):
    torch.testing.assert_close(found, torch.as_tensor(expected), rtol=0, atol=atol)


@pytest.fixture(autouse=True)
def block_sizes(monkeypatch):
    """Blocks small enough for every traversal here to have many."""
    monkeypatch.setattr(plane, "BLOCK_NUMBERS", 50 * K)
    monkeypatch.setattr(plane, "ALIGNED", 8)
    monkeypatch.setattr(plane, "GAP", 4)


@pytest.mark.slow
@settings(max_examples=limit_examples(150))
@given(requests())
def test_the_map_is_the_matrix_of_the_steps(asked):
    weights = attend(asked.q, asked.k, asked.k, asked.mask, **asked.options).weights
    found = AttentionMap(asked.q, asked.k, asked.mask, **asked.options)
    assert found.shape == weights.shape
    close(found.dense(), weights)
    close(found[...], weights)


def logarithm(weights):
    return weights.log().masked_fill(weights == 0, 0)


@settings(max_examples=limit_examples(100))
@given(requests())
def test_statistics_are_those_of_the_dense_matrix(asked):
    steps = attend(asked.q, asked.k, asked.k, asked.mask, **asked.options)
    found = AttentionMap(asked.q, asked.k, asked.mask, **asked.options)
    weights, (b, h, q, k) = steps.weights, steps.weights.shape
    close(found.entropy(), -(weights * logarithm(weights)).sum(-1), atol=1e-11)
    close(found.received(), weights.sum(-2))
    half = torch.arange(k) % 2 == 0
    close(found.mass(half), weights[..., half].sum(-1))
    close(found.mass(slice(1, None)), weights[..., 1:].sum(-1))
    masked = steps.masked
    if "sinks" in asked.options:
        masked = torch.cat([masked, asked.options["sinks"].view(-1, 1, 1).expand(b, h, q, 1)], -1)
    close(
        found.logsumexp(), masked.logsumexp(-1) if masked.shape[-1] else torch.full((b, h, q), -math.inf, dtype=torch.float64)
    )


@pytest.mark.parametrize("offset", [0, 7, -5, torch.tensor([3, -11])])
@pytest.mark.parametrize("back", [0, 1, 4, -2])
def test_a_diagonal_is_the_weight_at_a_distance_from_the_query_s_own_position(offset, back):
    found, weights = both(Window(30, 30), offset=offset)
    expected = torch.zeros(B, H, Q, dtype=torch.float64)
    starts = [offset] * B if isinstance(offset, int) else offset.tolist()
    for b in range(B):
        for i in range(Q):
            if 0 <= i + starts[b] - back < K:
                expected[b, :, i] = weights[b, :, i, i + starts[b] - back]
    close(found.diagonal(back), expected)


@pytest.mark.parametrize("sinks", [None, torch.linspace(-1, 1, H, dtype=torch.float64)])
@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_the_mass_of_a_set_of_keys_is_the_sum_of_their_columns(rule, sinks):
    found, weights = both(rule, sinks=sinks, offset=3)
    for keys in (torch.arange(K) % 7 == 0, torch.arange(K) % 7 > 0, torch.zeros(K, dtype=torch.bool)):
        close(found.mass(keys), weights[..., keys].sum(-1))


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_an_overview_holds_every_statistic_of_one_traversal(rule):
    found, weights = both(rule, offset=3)
    seen = found.overview()
    close(seen.logsumexp, found.logsumexp())
    close(seen.entropy, found.entropy())
    close(seen.received, weights.sum(-2))
    close(seen.largest, weights.amax(-1))
    close(seen.first, weights[..., 0])
    close(seen.itself, found.diagonal(0))
    close(seen.previous, found.diagonal(1))
    positions = torch.arange(Q).unsqueeze(-1) + 3 - torch.arange(K)
    close(seen.distance, (weights * positions).sum(-1), atol=1e-9)
    close(seen.mean, pool_weights(weights, 256, 256, "mean"))
    close(seen.max, pool_weights(weights, 256, 256, "max"))


def pool_weights(weights, rows, columns, how):
    """Pooling by its definition."""
    b, h, q, k = weights.shape
    picture = torch.zeros(b, h, rows, columns, dtype=weights.dtype)
    for r in range(rows):
        for c in range(columns):
            bin_ = weights[:, :, r * q // rows : (r + 1) * q // rows, c * k // columns : (c + 1) * k // columns]
            if bin_.numel():
                picture[:, :, r, c] = {"mean": bin_.mean, "max": bin_.amax, "sum": bin_.sum}[how]((-2, -1))
    return picture


@pytest.mark.slow
@pytest.mark.parametrize("how", ["mean", "max", "sum"])
@pytest.mark.parametrize("size", [(1, 1), (7, 11), (17, 3), (Q, K)])
def test_a_picture_is_the_matrix_in_bins(how, size):
    found, weights = both(Causal() & Window(40))
    found, weights = found.select(0, [1]), weights[:1, 1:2]
    close(found.pooled(*size, how), pool_weights(weights, *size, how))


@pytest.mark.parametrize("how", ["mean", "max", "sum"])
@pytest.mark.parametrize(
    ("rows", "columns"), [(slice(20, 90), slice(10, 200)), (slice(0, None), slice(5, 6)), (slice(250, 260), slice(None))]
)
def test_a_tile_is_the_picture_of_a_part(how, rows, columns):
    found, weights = both(offset=2)
    found, weights = found.select(heads=slice(2, 4)), weights[:, 2:4]
    part = weights[:, :, rows, columns]
    close(found.tile(rows, columns, (5, 3), how), pool_weights(part, 5, 3, how))
    found.logsumexp()  # known denominators are another way to the same
    close(found.tile(rows, columns, 4, how), pool_weights(part, 4, 4, how))


@pytest.mark.parametrize("rule", [Causal(), Given(torch.ones(Q, K, dtype=torch.bool))])
def test_a_tile_without_queries_or_keys_is_0_whatever_was_computed_before(rule):
    found = AttentionMap(*tensors(torch.float32), rule).select(heads=slice(0, 2))
    for _ in range(2):
        assert found.tile(slice(7, 7), slice(0, 9), (2, 3)).tolist() == torch.zeros(B, 2, 2, 3).tolist()
        assert found.tile(slice(0, 9), slice(7, 7), (2, 3)).tolist() == torch.zeros(B, 2, 2, 3).tolist()
        found.logsumexp()


@pytest.mark.slow
def test_the_largest_weights_come_first_with_their_keys():
    for rule in RULES:
        found, weights = both(rule)
        values, keys = found.top(12)
        close(values, weights.topk(12).values)
        close(weights.gather(-1, keys), values)


INDICES = [
    (0, 1, 2, 3),
    (0, 1, 2),
    (0, 1),
    1,
    (..., 5),
    (0, ..., slice(3, 40, 7)),
    (slice(None), [0, 2], 7, slice(None, None, 2)),
    ([0, 1], [3, 5], [200, 7], [100, 2]),
    ([0, 1], slice(None), [200, 7]),
    (0, 2, slice(10, 20), [3, 3, 4]),
    (0, 2, torch.tensor([[1], [299]]), torch.tensor([0, 5, 6])),
    (-1, -2, -3, -4),
    (0, 0, slice(None), slice(0, 5)),
    (0, 0, torch.arange(Q) % 2 == 0, 0),
    (0, 0, slice(5, 5)),
]


@pytest.mark.parametrize("index", INDICES, ids=str)
@pytest.mark.parametrize("known", [False, True])
def test_an_index_gives_what_it_gives_on_the_dense_tensor(index, known):
    found, weights = both()
    if known:
        found.logsumexp()
    expected = weights[index]
    assert found[index].shape == expected.shape
    close(found[index], expected)


@settings(max_examples=limit_examples(60))
@given(st.data())
def test_any_mixture_of_ints_slices_and_lists_gives_what_it_gives_on_the_dense_tensor(data):
    q, k = torch.randn(2, 3, 5, 4, dtype=torch.float64), torch.randn(2, 3, 7, 4, dtype=torch.float64)
    weights, found = attend(q, k, k, Causal(), offset=2).weights, AttentionMap(q, k, Causal(), offset=2)
    index = []
    for size in data.draw(st.sampled_from([weights.shape[:n] for n in range(1, 5)])):
        one = st.integers(-size, size - 1)
        whole = st.slices(size).filter(lambda s: s.step is None or s.step > 0)
        index.append(data.draw(st.one_of(one, whole, st.lists(one, min_size=2, max_size=2))))
    close(found[tuple(index)], weights[tuple(index)])


def test_a_smaller_map_shares_memory_and_keeps_four_axes():
    found, weights = both(Padding([200, 90]) & Causal())
    part = found.select(batch=1, heads=[4, 0])
    assert part.shape == (1, 2, Q, K)
    assert part.nbytes == found.nbytes
    close(part.dense(), weights[1:, [4, 0]])
    close(part.select(heads=1).dense(), weights[1:, [0]])


@pytest.mark.parametrize("heads", [1, 2, G, H])
def test_products_are_those_of_the_dense_matrix_forwards_and_backwards(heads):
    found, weights = both(Causal() & Window(50))
    v = torch.randn(B, heads, K, E, dtype=torch.float64, requires_grad=True)
    r = torch.randn(B, heads, Q, E, dtype=torch.float64, requires_grad=True)
    spread_v, spread_r = (x.repeat_interleave(H // heads, 1) for x in (v, r))
    for product, expected, leaf in ((found @ v, weights @ spread_v, v), (found.mT @ r, weights.mT @ spread_r, r)):
        close(product, expected)
        seed = torch.randn_like(product)
        close(torch.autograd.grad(product, leaf, seed)[0], torch.autograd.grad(expected, leaf, seed)[0])


@pytest.mark.slow
def test_a_product_has_the_dtype_of_its_right_side():
    q, k = tensors(torch.bfloat16)
    found = AttentionMap(q, k, Causal())
    assert (found @ torch.zeros(B, G, K, E, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert (found.mT @ torch.zeros(B, H, Q, E, dtype=torch.float64)).dtype == torch.float64


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_entries_and_sums_are_exact(dtype, rule):
    q, k = tensors(dtype)
    exact = attend(q.double(), k.double(), k.double(), rule, softcap=20.0).weights
    found, allowed = (
        AttentionMap(q, k, rule, softcap=20.0),
        map_bounds(AttentionMap(q.double(), k.double(), rule, softcap=20.0)),
    )
    assert found.dense().dtype == torch.float32
    assert_within(found.dense(), exact, allowed.weights)
    assert_within(found[0, 1], exact[0, 1], allowed.weights[0, 1])
    assert_within(found.received(), exact.sum(-2), allowed.received)
    assert_within(found.entropy(), -(exact * logarithm(exact)).sum(-1), entropy_bound(torch.float32, allowed, exact))


def test_a_certificate_measures_row_sums_and_notices_a_changed_query():
    q, k = tensors(torch.float32)
    found = AttentionMap(q, k, Causal() & Padding([K, 0]), sinks=torch.zeros(H))
    found.logsumexp()
    all_rows = found.certificate(rows=Q)
    assert all_rows.exact
    assert all_rows.rows == B * H * Q
    double = AttentionMap(q.double(), k.double(), Causal() & Padding([K, 0]), sinks=torch.zeros(H, dtype=torch.float64))
    the_sink = 2 * gamma(torch.float32, EXPONENTIAL + 2)
    assert all_rows.error <= float(map_bounds(double).weights.sum(-1).max()) + the_sink
    assert not found.certificate(rows=7).exact
    q[0] += 1
    assert found.certificate().error > 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("head", range(H))
def test_the_certificate_of_a_map_with_a_nan_is_nan(dtype, head):
    q, k = tensors(dtype)
    q[0, head, 5] = torch.nan
    assert math.isnan(AttentionMap(q, k, Causal()).certificate(rows=Q).error)


def test_what_is_stored_grows_with_the_tokens_and_not_with_their_square():
    sizes = []
    for t in (1000, 2000):
        q = torch.zeros(1, 1, t, 8)
        found = AttentionMap(q, q, Causal())
        found.overview()
        sizes.append(found.nbytes)
    assert sizes[1] == 2 * sizes[0]


def test_answers_past_the_limit_state_the_bytes_and_what_to_ask_for():
    q = torch.zeros(1, 1, 100_000, 4)
    found = AttentionMap(q, q, Causal())
    with pytest.raises(TooLargeError, match=r"40,000,000,000 bytes, but the limit is 1,073,741,824. Use m\[...\], m.pooled"):
        found.dense()
    with pytest.raises(TooLargeError, match=r"m.pooled\(rows, columns\) or m.top\(n\)"):
        found[0, 0]
    with pytest.raises(TooLargeError, match=r"1,200,000,000 bytes, .* a smaller n"):  # weights of 4 bytes and keys of 8
        found.top(1000)
    with pytest.raises(TooLargeError, match="fewer rows and columns"):
        found.pooled(50_000, 50_000)
    assert found[0, 0, 99_999].shape == (100_000,)


def test_blocks_that_a_rule_leaves_empty_are_never_scored(monkeypatch):
    scored = []
    inner = plane.Plane.compute_scores
    monkeypatch.setattr(
        plane.Plane, "compute_scores", lambda self, q, k, *rest: scored.append(len(q) * len(k)) or inner(self, q, k, *rest)
    )
    q = torch.randn(1, 1, 2048, 4, dtype=torch.float64)
    AttentionMap(q, q, Window(64, 0)).received()
    assert sum(scored) < 2048 * (64 + 256 + 16) * 1.1
    scored.clear()
    AttentionMap(q, q, Causal()).received()
    assert sum(scored) < 0.6 * 2048**2


@pytest.mark.parametrize(
    ("ask", "error", "says"),
    [
        (lambda m: m[0, 0, 0, 0, 0], ShapeError, r"four axes \(b, h, q, k\)"),
        (lambda m: m[None], ShapeError, "not None or bools"),
        (lambda m: m[0, 9], ShapeError, "an index along h is out of range: got 9, but the axis has 0 to 5"),
        (lambda m: m.top(0), ConfigError, "at least 1 and at most the number of keys, 280; got 0"),
        (lambda m: m.pooled(0, 3), ConfigError, "number of rows must be a whole number of at least 1, got 0"),
        (lambda m: m.pooled(3, 3, "median"), ConfigError, "'mean', 'max', 'sum'; got 'median'"),
        (lambda m: m.tile(slice(0, 9, 2), slice(None), 3), ShapeError, "without a step"),
        (lambda m: m.mass(torch.zeros(3, dtype=torch.bool)), ShapeError, r"bool tensor \(280,\)"),
        (lambda m: m.select(heads=6), ShapeError, "heads is out of range: got 6, but the axis has 0 to 5"),
        (lambda m: m @ torch.zeros(B, 4, K, E), ShapeError, r"v must be \(b, h, t, e\) = \(2, 6 or a divisor, 280, e\)"),
        (lambda m: m.mT @ torch.zeros(B, H, K, E), ShapeError, "r must be"),
    ],
)
def test_what_cannot_be_asked_says_what_was_expected(ask, error, says):
    with pytest.raises(error, match=says):
        ask(both()[0])


@pytest.mark.slow
def test_autocast_does_not_round_what_a_map_computes():
    q, k = tensors(torch.float32)
    found = AttentionMap(q, k, Causal(), bias=torch.zeros(1))
    v, r = torch.randn(B, H, K, E), torch.randn(B, H, Q, E)
    asked = [
        found.dense,
        found.entropy,
        lambda: found.mass(slice(0, 9)),
        lambda: found.overview().distance,
        lambda: found @ v,
        lambda: found.mT @ r,
    ]
    plain = [ask() for ask in asked]
    with torch.autocast("cpu", torch.bfloat16):
        for ask, expected in zip(asked, plain, strict=True):
            assert torch.equal(ask(), expected)


@pytest.mark.parametrize("k", [7, 600])
@pytest.mark.parametrize(
    "transform",
    [
        lambda read, q: torch.func.grad(read, has_aux=True)(q),
        lambda read, q: torch.func.jvp(read, (q,), (q,), has_aux=True)[1:],
    ],
    ids=["grad", "jvp"],
)
def test_inside_a_transform_of_torch_func_a_map_has_the_same_numbers(transform, k):
    q, keys = torch.randn(1, 2, 5, 11), torch.randn(1, 2, k, 11)

    def read_map(x):
        m = AttentionMap(x, keys)
        return x.sum(), (m.dense(), m.overview().entropy)

    *_, numbers = transform(read_map, q)
    expected = AttentionMap(q, keys)
    for one, other in zip(numbers, (expected.dense(), expected.overview().entropy), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
