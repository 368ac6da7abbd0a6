import math

import pytest
import torch

from bounds import sum_bound
from dense import Recorded, close
from regard import AttentionMap, Causal, ConfigError, Given, Padding, ShapeError, Window
from regard.observe import compare as room
from regard.observe import record
from regard.observe.compare import compare
from regard.observe.head_divergence import jensen_shannon

B, H, T, D = 2, 3, 29, 5
WORDS = [f"w{n}" for n in range(T)]
ROUNDED = sum_bound(torch.float32, 1, math.log(2))  # a divergence is at most log 2; of float64 maps it is stored in float32


def maps(seed, layers=1, mask=None, b=B):
    torch.manual_seed(seed)
    mask = Causal() if mask is None else mask
    return [AttentionMap(*torch.randn(2, b, H, T, D).double(), mask) for _ in range(layers)]


def test_two_maps_are_compared_row_by_row(monkeypatch):
    (one,), (other,) = maps(1), maps(2)
    monkeypatch.setattr(room, "BLOCK_NUMBERS", 3 * T)
    found = compare(one, other)
    close(found.divergence[0], jensen_shannon(one.dense(), other.dense()), ROUNDED)
    assert found.queries.tolist() == list(range(T))


def test_rows_and_heads_that_differ_most_come_first():
    one, other = maps(1, layers=2), maps(2, layers=2)
    found = compare(Recorded(one), Recorded(other), top=17)
    every = torch.stack([jensen_shannon(a.dense(), b.dense()) for a, b in zip(one, other, strict=True)])  # (l, b, h, t)
    assert [row.divergence for row in found.rows] == pytest.approx(
        every.flatten().sort(descending=True).values[:17].tolist(), rel=0, abs=ROUNDED
    )
    for row in found.rows:
        assert float(every[row.layer, row.batch, row.head, row.query]) == pytest.approx(row.divergence, rel=0, abs=ROUNDED)
        assert row.keys == tuple(int(m[row.layer].dense()[row.batch, row.head, row.query].argmax()) for m in (one, other))
        assert row.name == f"layer.{row.layer}"
    means = every.mean((1, 3))
    assert [head.mean for head in found.heads] == pytest.approx(
        means.flatten().sort(descending=True).values.tolist(), rel=0, abs=ROUNDED
    )
    for head in found.heads:
        assert head.mean == pytest.approx(float(means[head.layer, head.head]), rel=0, abs=ROUNDED)
        assert head.largest == pytest.approx(float(every[head.layer, :, head.head].max()), rel=0, abs=ROUNDED)
        assert float(every[head.layer, head.batch, head.head, head.query]) == pytest.approx(head.largest, rel=0, abs=ROUNDED)


def test_a_map_and_itself_are_nowhere_apart():
    (one,) = maps(1)
    found = compare(one, one)
    assert float(found.divergence[0].max()) == 0
    assert {head.mean for head in found.heads} == {0.0}


def test_one_changed_key_is_found():
    torch.manual_seed(1)
    q, k = torch.randn(1, H, T, D), torch.randn(1, H, T, D)
    changed = k.clone()
    changed[:, 2, 13] += 10 * q[:, 2, 20]
    found = compare(AttentionMap(q, k, Causal()), AttentionMap(q, changed, Causal()))
    assert (found.heads[0].head, found.rows[0].head, found.rows[0].keys[1]) == (2, 2, 13)
    assert found.divergence[0][0, :2].max() == 0
    assert found.divergence[0][0, 2, :13].max() == 0  # earlier rows do not see it


def test_two_heads_of_one_map_are_compared():
    (one,) = maps(1)
    found = compare(one.select(heads=0), one.select(heads=2))
    close(found.divergence[0], jensen_shannon(one.dense()[:, :1], one.dense()[:, 2:]), ROUNDED)


def test_some_queries_cost_and_show_these_alone():
    (one,), (other,) = maps(1), maps(2)
    found = compare(one, other, queries=[5, -1])
    close(found.divergence[0], jensen_shannon(one.dense(), other.dense())[:, :, [5, -1]], ROUNDED)
    assert {row.query for row in found.rows} == {5, T - 1}
    assert {head.query for head in found.heads} <= {5, T - 1}


def test_padding_in_either_is_left_out():
    (one,), (other,) = maps(1, mask=Causal() & Padding([T, T - 7])), maps(2)
    found = compare(one, other, top=10**6)
    assert found.divergence[0][1, :, T - 7 :].isnan().all()
    assert found.divergence[0].isnan().sum() == 7 * H
    assert len(found.rows) == B * H * T - 7 * H
    assert found.heads[0].mean == pytest.approx(
        float(found.divergence[0].double().transpose(0, 1).flatten(1).nanmean(1).max()), rel=1e-9
    )


def test_no_query_of_cross_attention_is_left_out_for_padding_among_the_keys():
    padded = Padding([T, T - 20])
    torch.manual_seed(0)
    one, other = (AttentionMap(*(torch.randn(B, H, t, D).double() for t in (T - 4, T)), padded) for _ in range(2))
    expected = jensen_shannon(one[...], other[...])
    torch.testing.assert_close(compare(one, other, kind="cross").divergence[0].double(), expected, rtol=0, atol=ROUNDED)


def test_heads_without_a_row_to_compare_are_not_called_equal():
    first, last = (Given(torch.eye(T, dtype=torch.bool) & (torch.arange(T) < 5).eq(is_first)) for is_first in (True, False))
    (one,), (other,) = maps(1, mask=first), maps(2, mask=last)  # each query is padding in one of the two
    broken = AttentionMap(torch.full((B, H, T, D), math.nan), torch.zeros(B, H, T, D), Causal())
    for found in (compare(one, other), compare(maps(1)[0], broken)):
        assert len(found.heads) == H
        assert all(math.isnan(head.mean) and math.isnan(head.largest) for head in found.heads)
        assert found.rows == ()
        assert "nan" in str(found)


def test_heads_with_a_row_to_compare_come_before_those_without():
    q = torch.randn(B, H, T, D)
    q[:, 1] = math.nan
    found = compare(maps(1)[0], AttentionMap(q, torch.randn(B, H, T, D), Causal()))
    assert [math.isnan(head.mean) for head in found.heads] == [False] * (H - 1) + [True]


def test_a_row_blind_in_one_of_the_two_is_log_2_apart():
    q, k = torch.randn(1, 1, 1, D).double(), torch.randn(2, 1, 1, 4, D).double()
    found = compare(AttentionMap(q, k[0]), AttentionMap(q, k[1], Padding([0])))
    assert found.rows[0].divergence == pytest.approx(math.log(2), rel=0, abs=ROUNDED)


def test_it_prints_the_heads_and_rows_with_their_words():
    one, other = (Recorded(maps(seed, layers=4, b=1), tokens=WORDS) for seed in (1, 2))
    found = compare(one, other)
    lines = str(found).splitlines()
    assert max(map(len, lines)) <= 80
    assert "the first 10 of 12 heads" in lines
    assert repr(found).startswith("Comparison(12 heads, ")
    assert "the first 10 of 100 rows" in lines
    row = found.rows[0]
    keys = [f"{key} w{key}" for key in row.keys]
    assert any(
        line.split() == f"{row.layer}.{row.head} {row.query} w{row.query} {row.divergence:.3g} {' '.join(keys)}".split()
        for line in lines
    )
    assert "batch" in str(compare(*maps(1), *maps(2)))


def test_recordings_of_different_heads_are_refused():
    layer = torch.nn.Identity()
    layer.forward = lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
    recordings = []
    for heads in ([0, 2], [2, 1], [2, 1]):
        with record(layer, heads=heads) as recording:
            layer(torch.randn(1, 3, 5, 2))
        recordings.append(recording)
    with pytest.raises(ShapeError, match=r"the heads \[0, 2\] and \[2, 1\]"):
        compare(*recordings[:2])
    assert {row.head for row in compare(*recordings[1:]).rows} == {1, 2}


def test_what_does_not_match_is_refused():
    (one,), (other,) = maps(1), maps(2)
    with pytest.raises(ShapeError, match=r"of one length"):
        compare(one, AttentionMap(torch.randn(B, H, T + 1, D), torch.randn(B, H, T + 1, D)))
    with pytest.raises(ShapeError, match="1 and 2 layers"):
        compare(Recorded(maps(1)), Recorded(maps(1, layers=2)))
    with pytest.raises(ShapeError, match=r"of layer\.0"):
        compare(Recorded([one]), Recorded([one.select(heads=0)]))
    with pytest.raises(ConfigError, match="two maps or two recordings"):
        compare(one, Recorded([other]))
    with pytest.raises(ConfigError, match="top"):
        compare(one, other, top=0)


def test_masks_that_differ_are_named_with_their_layers():
    q, k = torch.randn(2, 1, 2, 9, 4)
    one, other = AttentionMap(q, k, Causal() & Window(3)), AttentionMap(q, k, Causal())
    assert f"masks: {Causal() & Window(3)} in one, Causal() in the other." in str(compare(one, other))
    assert "masks:" not in str(compare(other, other))
