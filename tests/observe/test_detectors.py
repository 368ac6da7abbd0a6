import math
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bounds import assert_within, sum_bound
from dense import Dense, both, close
from regard import AttentionMap, Causal, ConfigError, Everything, Given, Padding, ShapeError, Window
from regard.compiled.threads import can_run_loops
from regard.map import small_maps
from regard.observe import detectors, map_view
from regard.observe.classification.head_scores import HeadOptions, compute_scores, estimate_heads
from regard.observe.map_view import MapView
from strategies import requests

B, H, T, D = 2, 3, 23, 5
ASKED = requests().filter(lambda asked: asked.k.shape[2] > 0)
RULES = [
    Causal(),
    Window(4, 0),
    Window(3, 2),
    Causal() & Padding([T - 6, T]),
    Padding([T, T - 6]),
    Causal() & Given((torch.arange(T) >= torch.tensor([[5], [0]])).view(B, 1, 1, T)),  # left padding
]


@pytest.fixture(autouse=True, scope="module")
def limit_batches():
    """Up to 8 queries and keys all matrices go through one pass, and above one at a time, as elsewhere above 256."""
    with mock.patch.object(small_maps, "LONGEST", 8):
        yield


def tensors(dtype=torch.float64):
    torch.manual_seed(3)
    return torch.randn(B, H, T, D, dtype=dtype) * 2, torch.randn(B, 1, T, D, dtype=dtype) * 2


def maps(mask, dtype=torch.float64):
    return AttentionMap(*tensors(dtype), mask)


@settings(max_examples=60)
@given(ASKED, st.integers(-2, 4))
def test_the_weight_so_far_back_is_a_diagonal_of_the_matrix(asked, back):
    m, dense = both(asked)

    def find_key(b, i):
        return dense.positions[b][i] - back

    expected = dense.mean(
        lambda b, h, i: dense.weights[b, h, i, find_key(b, i)], lambda b, h, i: dense.sees(b, h, i, find_key(b, i))
    )
    close(detectors.weight_on_previous(m, back), expected)


@pytest.mark.slow
@settings(max_examples=60)
@given(ASKED)
def test_statistics_of_rows_are_means_over_the_queries_that_count(asked):
    m, dense = both(asked)
    look = MapView(m)

    def compute_mean_distance(b, h, i):
        return sum(w * (dense.positions[b][i] - j) for j, w in enumerate(dense.weights[b, h, i].tolist()))

    close(detectors.weight_on_first(look), dense.mean(lambda b, h, i: dense.weights[b, h, i, dense.find_first_visible_key(b)]))
    close(detectors.sink_rate(look), dense.mean(lambda b, h, i: dense.weights[b, h, i, dense.find_first_visible_key(b)] > 0.3))
    close(detectors.entropy(look), dense.mean(dense.entropy))
    close(detectors.effective_keys(look), dense.mean(dense.effective_keys))
    close(detectors.distance(look), dense.mean(compute_mean_distance))
    close(detectors.breadth(look), dense.mean(dense.breadth))


@pytest.mark.slow
@settings(max_examples=60)
@given(ASKED, st.integers(0, 3))
def test_the_local_share_is_the_weight_within_a_window(asked, window):
    m, dense = both(asked)
    k = dense.shape[3]

    def near(b, i):
        return [j for j in range(k) if abs(dense.positions[b][i] - j) <= window]

    close(detectors.local_weight(m, window), dense.mean(lambda b, h, i: dense.weights[b, h, i, near(b, i)].sum()))
    close(
        detectors.uniform_local_weight(m, window),
        dense.mean(lambda b, h, i: dense.visible[b, h, i, near(b, i)].double().sum() / dense.visible[b, h, i].sum()),
    )


@settings(max_examples=60)
@given(ASKED)
def test_heavy_hitters_hold_the_share_of_the_most_received_keys(asked):
    m, dense = both(asked)
    b, h, _, k = dense.shape
    expected = torch.full((b, h), math.nan, dtype=torch.float64)
    for n in range(b):
        for one in range(h):
            queries = dense.queries(n, one)
            padding = {dense.positions[n][i] for i in range(dense.shape[2]) if i not in queries}
            received = sorted(
                (float(dense.weights[n, one, queries, j].sum()) for j in range(k) if j not in padding), reverse=True
            )
            if sum(received):
                expected[n, one] = sum(received[: max(1, math.ceil(0.3 * len(received)))]) / sum(received)
    close(detectors.heavy_hitter_share(m, 0.3), expected)


@pytest.mark.slow
@settings(max_examples=60)
@given(ASKED)
def test_the_weight_on_stripes_is_that_on_the_most_received_keys_but_the_first(asked):
    m, dense = both(asked)
    b, h, q, k = dense.shape
    marked = detectors.mark_stripes(MapView(m), 0.3)
    expected = torch.full((b, h), math.nan, dtype=torch.float64)
    for n in range(b):
        for one in range(h):
            queries = dense.queries(n, one)
            keys = marked[n, one].nonzero().flatten().tolist()
            received = dense.weights[n, one, queries].sum(0)
            padding = {dense.positions[n][i] for i in range(q) if i not in queries}
            real = [j for j in range(k) if j not in padding]
            first = MapView(m).first_token_indices[n]
            assert first not in keys
            assert len(keys) <= max(1, math.ceil(0.3 * len(real)))
            others = [j for j in real if j not in keys and j != first]
            assert not others or not keys or max(received[others]) <= min(received[keys]) + 1e-9
            if queries:
                expected[n, one] = dense.weights[n, one][queries][:, keys].sum(-1).mean()
    close(detectors.stripe_weight(m, 0.3), expected)


@pytest.mark.slow
@settings(max_examples=60)
@given(ASKED, st.data())
def test_the_needle_weight_is_the_weight_of_questions_on_the_needle(asked, data):
    m, dense = both(asked)
    _, _, q, k = dense.shape
    start = data.draw(st.integers(0, k - 1))
    needle = range(start, data.draw(st.integers(start + 1, k)))
    questions = data.draw(st.lists(st.integers(0, q - 1), min_size=1, unique=True))
    inside = slice(needle.start, needle.stop)
    mass = dense.mean(lambda b, h, i: dense.weights[b, h, i, inside].sum(), lambda b, h, i: i in questions)
    close(detectors.weight_on_needle(m, inside, questions), mass)
    rows = dense.weights[:, :, questions].sort(-1, descending=True).values
    if k == 1 or not ((rows[..., 0] > 0) & (rows[..., 0] - rows[..., 1] < 1e-12)).any():  # a softcap may make all scores equal
        most = dense.mean(lambda b, h, i: int(dense.weights[b, h, i].argmax()) in needle, lambda b, h, i: i in questions)
        close(detectors.needle_hit_rate(m, inside, questions), most)
    for ask in (detectors.weight_on_needle, detectors.needle_hit_rate):
        with pytest.raises(ConfigError, match="not empty"):
            ask(m, slice(start, start), questions)


@settings(max_examples=60)
@given(ASKED, st.data())
def test_weight_on_classes_of_keys_is_summed_for_several_at_once(asked, data):
    m, dense = both(asked)
    b, _, _, k = dense.shape
    classes = torch.rand(b, 3, k) > data.draw(st.sampled_from([0.3, 0.9]))
    expected = [dense.mean(lambda n, h, i, c=c: dense.weights[n, h, i, classes[n, c]].sum()) for c in range(3)]
    close(torch.stack([one.mean() for one in detectors.score_classes(MapView(m), classes)], -1), torch.stack(expected, -1))


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize(
    "detector",
    [
        "weight_on_previous",
        "weight_on_self",
        "weight_on_first",
        "sink_rate",
        "entropy",
        "effective_keys",
        "breadth",
        "distance",
        "local_weight",
    ],
)
def test_padding_changes_no_score(rule, detector):
    """A batch row has the scores that its real tokens have in a map of their own."""
    score, (q, k) = getattr(detectors, detector), tensors()
    found, table = score(maps(rule)), rule.table(T, T).expand(B, H, T, T)
    for row in range(B):
        real = table[row, 0].diagonal().nonzero().flatten()  # a token sees itself, padding does not
        own = Given(table[row, 0][real][:, real])
        close(found[row : row + 1], score(AttentionMap(q[row : row + 1, :, real], k[row : row + 1, :, real], own)))


def test_breadth_is_taken_of_some_queries_where_they_are_many(monkeypatch):
    m = maps(Causal())
    monkeypatch.setattr(map_view, "SAMPLE", 4)
    monkeypatch.setattr(map_view, "BLOCK_NUMBERS", 2 * T)
    chosen = torch.tensor([0, 5, 11, 17])  # of 23, evenly spaced
    close(detectors.breadth(m), (m.entropy()[..., chosen].exp() / (chosen + 1)).mean(-1))


def test_a_head_in_which_no_query_counts_has_no_score():
    m = maps(Given(torch.zeros(T, T, dtype=torch.bool)))
    for detector in (
        detectors.weight_on_previous,
        detectors.weight_on_first,
        detectors.entropy,
        detectors.breadth,
        detectors.heavy_hitter_share,
    ):
        assert detector(m).isnan().all()


@settings(max_examples=60)
@given(ASKED)
def test_the_positional_variance_is_the_coefficient_of_determination_of_the_distance(asked):
    m, dense = both(asked)
    found = detectors.positional_variance(m)
    for b in range(m.shape[0]):
        for h in range(m.shape[1]):
            by_distance = {}
            for i in range(m.shape[2]):
                if dense.counts(b, h, i):
                    for j in range(m.shape[3]):
                        if dense.sees(b, h, i, j):
                            by_distance.setdefault(dense.positions[b][i] - j, []).append(float(dense.weights[b, h, i, j]))
            weights = [w for group in by_distance.values() for w in group]
            mean = sum(weights) / max(len(weights), 1)
            total = sum((w - mean) ** 2 for w in weights)
            rest = sum((w - sum(group) / len(group)) ** 2 for group in by_distance.values() for w in group)
            if total <= 1e-10 * sum(w * w for w in weights):
                continue  # equal weights: whether the last bit is left is rounding
            assert float(found[b, h]) == pytest.approx(1 - rest / total, abs=1e-5)


def test_a_head_that_looks_by_position_alone_is_explained_and_one_of_random_words_is_not():
    torch.manual_seed(0)
    place = torch.linalg.qr(torch.randn(64, 64))[0]
    before = AttentionMap(place.roll(1, 0).view(1, 1, 64, 64), place.view(1, 1, 64, 64), Causal(), scale=300.0)
    assert float(detectors.positional_variance(before)) > 0.95  # all but the first row
    words = AttentionMap(torch.randn(1, 1, 64, 8) * 3, torch.randn(1, 1, 64, 8) * 3, Causal())
    assert float(detectors.positional_variance(words)) < 0.2
    flat = AttentionMap(torch.zeros(1, 1, 9, 4), torch.zeros(1, 1, 9, 4))
    assert math.isnan(float(detectors.positional_variance(flat)))


@pytest.mark.parametrize("mask", [Causal(), Causal() & Padding([T - 6, T])])
def test_the_receiver_kurtosis_is_that_of_the_mean_weights_from_later_sentences(mask):
    m = maps(mask)
    numbers = torch.arange(T) // 2
    found = detectors.receiver_kurtosis(m, numbers.expand(B, T))
    weights = m.dense()
    lengths = [T - 6, T] if mask != Causal() else [T, T]
    for b, length in enumerate(lengths):
        for h in range(H):
            received = []
            for sentence in range(int(numbers.max()) + 1):
                keys = [j for j in range(T) if numbers[j] == sentence]
                queries = [i for i in range(length) if numbers[i] - sentence >= 4]
                if queries:
                    received.append(float(weights[b, h][queries][:, keys].mean()))
            x = torch.tensor(received, dtype=torch.float64)
            deviation = x - x.mean()
            expected = deviation.pow(4).mean() / deviation.square().mean() ** 2 - 3
            assert float(found[b, h]) == pytest.approx(float(expected), rel=1e-6)
    assert detectors.receiver_kurtosis(m, torch.zeros(B, T, dtype=torch.int64)).isnan().all()
    with pytest.raises(ShapeError, match="number of each key's sentence"):
        detectors.receiver_kurtosis(m, numbers)


@pytest.mark.parametrize("mask", ["causal", "padding", "heads", "none of own", "offsets"])
def test_the_scores_of_many_small_maps_are_those_of_one_matrix_at_a_time(mask):
    torch.manual_seed(4)
    b, h, t = 13, 3, 7
    rules = {
        "causal": Causal(),
        "padding": Padding([3 + n % 5 for n in range(b)]),
        "heads": Given(torch.rand(1, h, t, t) < 0.7),
        "none of own": Causal() & Padding([t] * b),
        "offsets": Causal(),
    }
    q, k = torch.randn(2, b, h, t, D, dtype=torch.float64)
    offset = torch.arange(b) % 3 if mask == "offsets" else 0
    q = q[:, :, : t - 2] if mask == "offsets" else q
    tokens, own = torch.arange(t).expand(b, t) % 4, mask != "none of own"
    options = HeadOptions(offsets=(2,), needle=slice(2, 4), window=2)

    def list_scores():
        found = compute_scores(MapView(AttentionMap(q, k, rules[mask], offset=offset), tokens, own), options)
        return {name: x if isinstance(x, torch.Tensor) else x.mean() for name, x in found.items()}

    ours = list_scores()
    with mock.patch.object(small_maps, "is_worth_batch", return_value=False):
        theirs = list_scores()
    assert ours.keys() == theirs.keys()
    for name, found in ours.items():
        assert torch.allclose(found, theirs[name], rtol=0, atol=1e-10, equal_nan=True), name


@pytest.mark.skipif(not can_run_loops(), reason="the compiled pass over many matrices needs numba and torch's OpenMP")
@given(st.integers(0, 2**32 - 1), st.sampled_from(["all", "causal", "padding", "heads", "rows", "blind"]), st.integers(0, 9))
def test_scores_from_sums_of_one_pass_are_those_from_the_weights(seed, mask, window):
    torch.manual_seed(seed)
    b, h, t = 13, 3, 7
    rules = {
        "all": Everything(),
        "causal": Causal(),
        "padding": Padding([3 + n % 5 for n in range(b)]),
        "heads": Given((torch.rand(1, h, t, t) < 0.7) | torch.eye(t, dtype=torch.bool)),
        "rows": Given((torch.rand(b, 1, t, t) < 0.7) | (torch.arange(t) == 2)),
        "blind": Given(torch.rand(b, h, t, t) < 0.3),
    }
    q, k = torch.randn(2, b, h, t, D)
    options = HeadOptions(window=window)

    def list_scores():
        look = MapView(AttentionMap(q, k, rules[mask]))
        found = compute_scores(look, options)
        chances = {f"chance of {name}": x.chance for name, x in found.items() if getattr(x, "chance", None) is not None}
        counts = {name: x.counts.double() for name, x in found.items() if not isinstance(x, torch.Tensor)}
        uniform = look.uniform_local_weight
        chances["local"] = detectors.uniform_local_weight(look, window) if uniform is None else uniform
        return look, {name: x if isinstance(x, torch.Tensor) else x.mean() for name, x in found.items()}, chances, counts

    look, ours, *known = list_scores()
    assert (look.sums is None) == (not look.has_visible_keys.all())
    with mock.patch.object(MapView, "gather_sums"):
        _, theirs, *expected = list_scores()
    assert ours.keys() == theirs.keys()
    for name, found in ours.items():
        assert_within(found, theirs[name], sum_bound(torch.float32, 2 * t, t), name)
    for found, other in zip(known, expected, strict=True):
        assert found.keys() == other.keys()
        for name, x in found.items():
            assert torch.allclose(x, other[name].expand_as(x), rtol=0, atol=1e-14, equal_nan=True), name


@pytest.mark.skipif(not can_run_loops(), reason="the compiled pass over many matrices needs numba and torch's OpenMP")
@pytest.mark.parametrize("documents", [1, 2, 5])
@pytest.mark.parametrize("has_empty", [False, True])
def test_means_of_one_pass_have_the_intervals_of_the_scores_of_each_query(documents, has_empty):
    torch.manual_seed(6)
    h, t = 3, 7
    bound = float(sum_bound(torch.float32, 2 * t, t))
    q, k = torch.randn(2, documents + has_empty, h, t, D)
    options = HeadOptions(window=2)
    rule = Causal() & Padding([t - 2] * documents + [1] * has_empty)  # of a single token, which has no previous one

    def list_scores(queries=slice(None)):
        return estimate_heads(MapView(AttentionMap(q, k, rule), queries=queries), options)

    found, some = list_scores(), list_scores(slice(3, 9))
    with mock.patch.object(MapView, "gather_sums"):
        expected, expected_some = list_scores(), list_scores(slice(3, 9))
    for ours, theirs in zip(found + some, expected + expected_some, strict=True):
        assert ours.keys() == theirs.keys()
        for name, score in ours.items():
            other = theirs[name]
            assert (score.count, math.isnan(score.low)) == (other.count, math.isnan(other.low)), name
            assert float(score) == pytest.approx(float(other), rel=0, abs=bound, nan_ok=True), name
            assert score.chance == pytest.approx(other.chance, rel=0, abs=1e-14, nan_ok=True), name
            ends = 14 * bound  # Student's quantile is at most 12.71, and the deviation is off by no more than the means
            assert [score.low, score.high] == pytest.approx([other.low, other.high], rel=0, abs=ends, nan_ok=True), name
    previous = found[0]["previous token"]
    assert previous.count == documents * (t - 3)
    assert previous.low < previous.high


NUMBERS = [torch.finfo(torch.float32).min, -1e9, -1e4]


@st.composite
def hiding_biases(draw, b, h, t):
    """A bias, what of it hides as numbers, and which keys it shows: (b, h, t, t) with left or right padding, or at random."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    places, number = torch.arange(t), draw(st.sampled_from(NUMBERS))
    rest = draw(
        st.sampled_from(
            [
                torch.zeros(1, 1, t, t),
                (places - places[:, None]).abs() * -torch.tensor([2.0**-n for n in range(h)]).view(1, h, 1, 1),
                torch.randn(b, h, t, t, generator=generator),
            ]
        )
    )
    pads = torch.randint(t + 1, (b, 1, 1, 1), generator=generator)
    seen = {
        "causal": (places <= places[:, None]).expand(b, 1, t, t),
        "left": (places <= places[:, None]) & (places >= pads),
        "right": (places <= places[:, None]) & (places < pads),
        "both sides": ((places < pads) & (places[:, None] < pads)).expand(b, 1, t, t),
        "random": torch.rand(b, h, t, t, generator=generator) < 0.6,
    }[draw(st.sampled_from(["causal", "left", "right", "both sides", "random"]))]
    rest, seen = rest.expand(b, h, t, t), seen.expand(b, h, t, t)
    filled = rest.masked_fill(~seen, number)
    return rest, draw(st.sampled_from([filled, rest + torch.zeros_like(rest).masked_fill(~seen, number)])), seen


@settings(max_examples=60)
@given(hiding_biases(B, H, 7), st.integers(0, 2**32 - 1))
def test_a_number_that_hides_is_no_key_that_a_query_sees(found, seed):
    rest, bias, seen = (x.double() if x.is_floating_point() else x for x in found)
    q, k = torch.randn(2, B, H, 7, D, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    look = MapView(AttentionMap(q, k, bias=bias))
    weights = (q @ k.mT / D**0.5 + rest).masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num()
    dense = Dense(weights, seen, [list(range(7))] * B)

    def is_after_first(b, h, i):
        return dense.sees(b, h, i, i - 1)

    close(detectors.entropy(look), dense.mean(dense.entropy))
    close(detectors.breadth(look), dense.mean(dense.breadth))
    close(detectors.weight_on_first(look), dense.mean(lambda b, h, i: weights[b, h, i, dense.find_first_visible_key(b)]))
    close(detectors.weight_on_previous(look), dense.mean(lambda b, h, i: weights[b, h, i, i - 1], is_after_first))
    close(look.visible_counts.mean(), dense.mean(lambda b, h, i: dense.visible[b, h, i].sum()))
    assert look.is_counted.tolist() == [[[dense.counts(b, h, i) for i in range(7)] for h in range(H)] for b in range(B)]


@pytest.mark.slow
@settings(max_examples=60)
@given(st.data(), st.integers(0, 2**32 - 1), st.sampled_from([2, 13]), st.booleans())
def test_every_score_is_the_same_of_a_mask_and_of_numbers_that_hide(data, seed, b, own):
    t = 7
    rest, bias, seen = data.draw(hiding_biases(b, H, t))
    q, k = torch.randn(2, b, H, t, D, generator=torch.Generator().manual_seed(seed))
    tokens, options = torch.arange(t).expand(b, t) % 4, HeadOptions(offsets=(2,), needle=slice(2, 4), window=2)

    def list_scores(m):
        scores = compute_scores(MapView(m, tokens, own), options)
        chances = {f"chance of {name}": x.chance for name, x in scores.items() if getattr(x, "chance", None) is not None}
        return {name: x if isinstance(x, torch.Tensor) else x.mean() for name, x in scores.items()} | chances

    expected = list_scores(AttentionMap(q, k, Given(seen), bias=rest))
    as_infinite = list_scores(AttentionMap(q, k, bias=rest.masked_fill(~seen, -torch.inf)))
    as_numbers = list_scores(AttentionMap(q, k, bias=bias))
    assert expected.keys() == as_infinite.keys() == as_numbers.keys()
    for name, score in expected.items():
        for other in (as_infinite, as_numbers):
            assert_within(other[name], score, sum_bound(torch.float32, 2 * t, t), name)
