import json
import math
import sys
import types

import pytest
import torch

from bounds import sum_bound
from dense import Recorded, close
from regard import AttentionMap, Causal, ConfigError, Documents, Padding, ShapeError, Window, record
from regard.observe import detectors, patterns
from regard.observe.classification.head_classification import heads
from regard.observe.classification.head_kinds import infer_kind
from regard.observe.classification.head_scores import SCORES
from regard.observe.head_table import Head, find_score
from regard.observe.map_view import MapView
from regard.observe.score_interval import Score
from regard.observe.value_norms import weight_by_norm

B, H, G, T, D = 2, 4, 2, 37, 11
WORDS = [f"w{n % 11}" if n % 7 else "," for n in range(T)]


def maps(layers=2, mask=None, seed=1):
    torch.manual_seed(seed)
    mask = Causal() if mask is None else mask
    return [AttentionMap(torch.randn(B, H, T, D).double(), torch.randn(B, G, T, D).double(), mask) for _ in range(layers)]


class MaskedLayer(torch.nn.Module):
    """Attention of tokens to each other under a mask of numbers."""

    def forward(self, x, mask):
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)


def tensor_of(numbers):
    """Scores as a tensor, which rounds none of them."""
    return torch.tensor(list(numbers), dtype=torch.float64)


def make_planted_map(t, width=16):
    """A causal map of random tokens, repeated, whose heads attend to what their names say, and its tokens.

    A token's code and a position's are random signs; keys and queries hold the codes of what they are to be found by.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, t // 16, (t // 2,), generator=generator).repeat(2)  # each some 16 times: more often than itself
    codes = torch.randn(t, width, generator=generator)
    codes /= codes.norm(dim=-1, keepdim=True)  # a code is nearer to itself than to any other
    place, token = codes, codes.flip(0)[tokens]
    before = [x.roll(1, 0) for x in (place, token)]  # of the position before
    for x in before:
        x[0] = 0
    resting = torch.zeros(t, width)
    names = ["previous token", "itself", "duplicate", "prefix matching", "broad", "first token", "stripe"]
    anchor, lines = torch.zeros(2, t, width)
    anchor[0, 0] = 1
    lines[3::40, 0] = 1
    q = torch.stack([before[0], place, token, token, resting, *torch.eye(width)[:1].expand(2, t, -1)])
    k = torch.stack([place, place, token, before[1], resting, anchor, lines])
    return names, AttentionMap(q.unsqueeze(0), k.unsqueeze(0), Causal(), scale=300.0), tokens


def test_a_table_has_a_row_for_each_head_with_the_mean_of_each_detector():
    found = heads(Recorded(maps(), tokens=WORDS))
    assert [(row.layer, row.name, row.head) for row in found] == [(n, f"layer.{n}", h) for n in range(2) for h in range(H)]
    numbers = {word: n for n, word in enumerate(dict.fromkeys(WORDS))}
    ids = torch.tensor([numbers[word] for word in WORDS]).expand(B, T)
    for n, m in enumerate(maps()):
        look = MapView(m, ids)
        expected = {
            "previous token": detectors.weight_on_previous(look),
            "itself": detectors.weight_on_self(look),
            "duplicate": patterns.score(look, patterns.Duplicate()),
            "induction": patterns.score(look, patterns.Induction()),
            "first token": detectors.weight_on_first(look),
            "sink": detectors.sink_rate(look),
            "local": detectors.local_weight(look),
            "distance": detectors.distance(look),
            "keys": detectors.effective_keys(look),
            "heavy": detectors.heavy_hitter_share(look),
            "stripe": detectors.stripe_weight(look),
            "punctuation": look.map.mass(torch.tensor([word == "," for word in WORDS])).mean(-1),
            "positional": detectors.positional_variance(look),
            "entropy": detectors.entropy(look),
            "breadth": detectors.breadth(look),
        }
        assert found.detectors == tuple(expected)
        for h in range(H):
            close(tensor_of(found[n * H + h].scores.values()), torch.stack(list(expected.values())).mean(1)[:, h])


def test_more_is_requested_by_its_own_argument():
    m = maps(1)[0]
    torch.manual_seed(2)
    values, projection = torch.randn(B, G, T, 7).double(), torch.randn(H, 7, 13).double()
    recording = Recorded([m], tokens=WORDS, values=[values])
    mine = torch.arange(T) % 3 == 0
    asked = {"offsets": (2, 5), "window": 3, "needle": slice(4, 6), "questions": [T - 1, T - 2]}
    found = heads(recording, **asked, classes={"mine": mine}, projections=[projection])
    expected = {
        "back 5": detectors.weight_on_previous(m, 5),
        "local": detectors.local_weight(m, 3),
        "needle": detectors.weight_on_needle(m, slice(4, 6), [T - 1, T - 2]),
        "mine": m.mass(mine).mean(-1),
        "first by norm": weight_by_norm(m, values, projection).weight_on_first(),
    }
    for name, score in expected.items():
        close(tensor_of(row.scores[name] for row in found), score.mean(0))
    assert {"back 2", "back 5"} <= set(found.detectors)
    assert "punctuation" not in found.detectors


def test_the_listed_names_are_those_of_the_scores_of_a_text_with_values():
    text = [word for n in range(9) for word in (f"w{n}", f"v{n}", "ends", ".")]
    torch.manual_seed(1)
    q, k, v = torch.randn(3, B, H, len(text), D, dtype=torch.float64)
    assert heads(Recorded([AttentionMap(q, k, Causal())], tokens=text, values=[v])).detectors == SCORES
    assert find_score("prev", SCORES) == find_score("previous token", SCORES) == "previous token"
    with pytest.raises(ConfigError, match="there is no score 'wizardry'; the scores are previous token, "):
        find_score("wizardry", SCORES)


def test_layers_are_chosen_by_number_or_name():
    everything = heads(Recorded(maps(3)))
    some = heads(Recorded(maps(3)), layers=["layer.2", 0])
    assert [row.layer for row in some] == [2] * H + [0] * H
    assert [row.scores for row in some] == [row.scores for row in everything if row.layer == 2] + [
        row.scores for row in everything if row.layer == 0
    ]


def test_without_words_the_table_says_what_is_not_in_it():
    found = heads(Recorded(maps(1)))
    assert not {"duplicate", "induction", "punctuation"} & set(found.detectors)
    assert str(found).splitlines()[-2:] == [
        "without the text of the tokens there is no duplicate, induction, punctuation:",
        "set recording.tokens in Python, before it is saved or shown.",
    ]
    with_ids = heads(Recorded(maps(1)), tokens=torch.arange(T) % 5)
    assert {"duplicate", "induction"} <= set(with_ids.detectors)
    assert "there is no punctuation:" in str(with_ids)


def test_a_padded_batch_row_counts_by_its_own_tokens():
    m = maps(1, Causal() & Padding([T - 9, T]))[0]
    torch.manual_seed(1)
    q, k = torch.randn(B, H, T, D).double(), torch.randn(B, G, T, D).double()
    alone = [AttentionMap(q[:1, :, : T - 9], k[:1, :, : T - 9], Causal()), AttentionMap(q[1:], k[1:], Causal())]
    each = [heads(Recorded([one])) for one in alone]
    for n, row in enumerate(heads(Recorded([m]))):
        assert row.scores == pytest.approx(
            {name: (each[0][n].scores[name] + each[1][n].scores[name]) / 2 for name in row.scores}
        )


def test_a_batch_row_that_sees_nothing_leaves_the_score_to_the_others():
    found = heads(Recorded(maps(1, Causal() & Padding([0, T]))))
    alone = heads(Recorded([maps(1)[0].select(batch=1)]))
    for row, other in zip(found, alone, strict=True):
        assert row.scores == pytest.approx(other.scores)
        assert row.kind == other.kind


@pytest.mark.parametrize("slope", [0.0, 0.5])
@pytest.mark.parametrize("is_left", [True, False])
@pytest.mark.parametrize("number", [-math.inf, torch.finfo(torch.float32).min, -1e9, -1e4])
def test_queries_on_padding_do_not_count_whatever_number_hides_it(number, is_left, slope):
    torch.manual_seed(5)
    t, pads, places = 13, 5, torch.arange(13)
    real = torch.stack([places >= pads if is_left else places < t - pads, torch.ones(t, dtype=torch.bool)])
    shown = (places <= places[:, None]) & real[:, None, None]
    distances = -slope * (places[:, None] - places).abs() * torch.arange(1, H + 1).view(H, 1, 1)
    x, layer = torch.randn(B, H, t, D), MaskedLayer()
    with record(layer) as recording:
        layer(x, distances.expand(B, H, t, t).masked_fill(~shown, number))
    weights = (x.double() @ x.double().mT / D**0.5 + distances).masked_fill(~shown, -torch.inf).softmax(-1).nan_to_num()
    entropy = torch.special.entr(weights).sum(-1)
    first = torch.stack([weights[0, ..., pads if is_left else 0], weights[1, ..., 0]])
    shares = {
        "entropy": entropy,
        "breadth": entropy.exp() / shown.sum(-1),
        "first token": first,
        "itself": weights.diagonal(0, 2, 3),
    }
    for head, row in enumerate(heads(recording)):
        for name, each in shares.items():
            mean = torch.stack([rows[head, counted].mean() for rows, counted in zip(each, real, strict=True)]).mean()
            assert row.scores[name] == pytest.approx(float(mean), abs=sum_bound(torch.float32, 4 * t, t))
            assert row.scores[name].count == int(real.sum())
        chance = torch.stack([(1 / shown[n, 0].sum(-1))[real[n]].mean() for n in range(B)]).mean()
        assert row.scores["itself"].chance == pytest.approx(float(chance))


def test_cross_attention_has_the_scores_that_mean_something_there():
    m = AttentionMap(torch.randn(B, H, 5, D).double(), torch.randn(B, G, T, D).double(), Padding([T - 3, T]))
    found = heads(Recorded([m], tokens=WORDS), kind="cross")
    assert found.detectors == ("first token", "sink", "keys", "heavy", "punctuation", "entropy", "breadth")
    assert {row.kind for row in found} <= {"first token", "broad", "unclear"}
    entropy = m.entropy().mean(2).mean(0)
    close(tensor_of(row.scores["entropy"] for row in found), entropy)


def test_planted_heads_are_named_for_what_they_do():
    names, m, tokens = make_planted_map(256)
    found = heads(Recorded([m]), tokens=tokens)
    assert [row.kind for row in found] == names
    for name, row in zip(names, found, strict=True):
        if name in row.scores:
            assert row.scores[name] > (0.6 if name == "duplicate" else 0.9)  # a token is like itself, too


def test_a_stripe_is_named_with_its_words():
    names, m, _ = make_planted_map(256)
    words = [f" w{n}" for n in range(256)]
    row = heads(Recorded([m]), tokens=words)[names.index("stripe")]
    assert row.kind == "stripe"
    assert row.sentence.startswith("attends to the same few tokens from everywhere: 0.9")
    assert row.sentence.endswith(": ‘w3’, ‘w43’, ‘w83’")


def test_chance_is_the_score_of_a_head_that_attends_equally_to_what_it_sees():
    names, m, tokens = make_planted_map(64)
    found = heads(Recorded([m]), tokens=tokens)
    equal = found[names.index("broad")].scores
    for name in ("previous token", "itself", "duplicate", "induction", "first token", "stripe"):
        assert equal[name].chance == pytest.approx(float(equal[name]), rel=1e-5), name
        assert equal[name].to_dict()["chance"] == equal[name].chance
    for name in ("previous token", "itself", "duplicate", "induction", "first token"):
        assert {row.scores[name].chance for row in found} == {equal[name].chance}  # the same rows see the same keys
    assert math.isnan(equal["entropy"].chance)
    assert "chance" not in equal["entropy"].to_dict()


@pytest.mark.parametrize("mask", [Causal() & Window(5), Causal() & Documents([0] * 7 + [1] * 16)])
def test_chance_of_the_first_token_is_zero_where_it_cannot_be_seen(mask):
    q, k = torch.zeros(2, 1, 2, 23, 5)  # equal weights
    score = heads(Recorded([AttentionMap(q, k, mask)]))[0].scores["first token"]
    assert score.chance == pytest.approx(float(score))
    assert score.count == 23


@pytest.mark.slow
def test_planted_heads_are_found_in_a_text_of_16384_tokens():
    t = 16_384
    names, m, tokens = make_planted_map(t)
    found = heads(Recorded([m]), tokens=tokens, needle=slice(100, 140), questions=[t - 1])
    assert [row.kind for row in found] == names
    by_name = dict(zip(names, found, strict=True))
    assert by_name["previous token"].scores["previous token"] > 0.9
    assert by_name["previous token"].scores["distance"] == pytest.approx(1, abs=0.2)  # codes of 16,384 tokens come near
    assert by_name["itself"].scores["keys"] == pytest.approx(1, abs=0.2)
    assert by_name["duplicate"].scores["duplicate"] > 0.4
    assert by_name["prefix matching"].scores["induction"] > 0.9
    assert by_name["first token"].scores["sink"] == 1
    broad = by_name["broad"].scores  # equal weights: what each score is can be counted
    near = sum_bound(torch.float32, t)  # of t exponentials, all 1, whose sum is exact; and of t unlike distances
    assert broad["entropy"] == pytest.approx(math.lgamma(t + 1) / t, rel=near)
    assert broad["first token"] == pytest.approx(sum(1 / n for n in range(1, t + 1)) / t, rel=near)
    assert broad["distance"] == pytest.approx((t - 1) / 4, rel=near)
    assert broad["breadth"] == pytest.approx(1, rel=near)
    assert broad["needle"] == pytest.approx(40 / t, rel=near)
    count = torch.zeros(t // 16)
    earlier = torch.empty(t)
    for i, token in enumerate(tokens.tolist()):
        earlier[i] = count[token]
        count[token] += 1
    duplicate = (earlier / (torch.arange(t) + 1))[earlier > 0].double().mean()
    assert broad["duplicate"] == pytest.approx(float(duplicate), rel=near)


def near(mean: float, half: float = 0.01) -> Score:
    """A score whose interval is so wide on either side."""
    return Score(mean, mean - half, mean + half, 100)


@pytest.mark.parametrize(
    ("scores", "halfway", "kind"),
    [
        ({"previous token": near(0.5), "induction": near(0.6), "first token": near(0.55)}, 1.0, "prefix matching"),
        ({"induction": near(0.6), "copying": near(2.0)}, 1.0, "induction"),
        ({"induction": near(0.6), "copying": near(0.0)}, 1.0, "prefix matching"),  # it is not sure that it copies
        ({"induction": near(0.6, 0.1), "first token": near(0.5, 0.25)}, 1.0, "prefix matching"),  # the second is not claimed
        ({"previous token": near(0.6), "first token": near(0.615)}, 1.0, "unclear"),  # their intervals overlap
        ({"previous token": near(0.405)}, 1.0, "unclear"),  # the interval reaches below the threshold
        ({"previous token": near(0.42)}, 1.0, "previous token"),
        ({"itself": Score(math.nan), "first token": near(0.32)}, 1.0, "first token"),
        ({"first token": near(0.305)}, 1.0, "unclear"),
        ({"first token": Score(0.9)}, 1.0, "unclear"),  # of one query: without an interval
        ({"breadth": near(0.52), "local": near(0.9)}, 0.6, "broad"),
        ({"breadth": near(0.505), "local": near(0.62)}, 0.6, "local"),
        ({"local": near(0.605)}, 0.6, "unclear"),
        ({"local": near(1.0)}, 1.0, "unclear"),
        ({"first token": Score(math.nan), "breadth": Score(math.nan)}, math.nan, "unclear"),
        ({"previous token": Score(0.5, 0.49, 0.51, 100, 0.3)}, 1.0, "previous token"),  # (0.49 - 0.3) / 0.7 is above 0.2
        ({"previous token": Score(0.5, 0.49, 0.51, 100, 0.4)}, 1.0, "unclear"),  # (0.49 - 0.4) / 0.6 is not
        ({"itself": Score(1.0, 1.0, 1.0, 100, 1.0)}, 1.0, "unclear"),  # queries that see one key
        ({"stripe": Score(0.5, 0.49, 0.51, 100, 0.05)}, 0.6, "stripe"),
        ({"stripe": Score(0.5, 0.49, 0.51, 100, 0.4), "local": near(0.62)}, 0.6, "local"),
    ],
)
def test_the_kind_follows_its_rule(scores, halfway, kind):
    row = Head(0, "layer.0", 0, kind, {"first token": near(0.0), "breadth": near(0.0), "local": near(0.0)} | scores)
    assert infer_kind(row.scores, halfway) == kind
    if kind == "unclear":
        assert row.sentence.startswith("no clear kind: ")
    else:
        assert row.sentence.startswith("attends to ")
        assert " on 100 queries" in row.sentence


def test_a_table_as_plain_values_is_json():
    table = heads(Recorded(maps(1), tokens=WORDS))
    rows = json.loads(json.dumps(table.to_dicts()))
    assert all(list(row) == ["layer", "head", "kind", "sentence", "scores"] for row in rows)
    assert [(row["layer"], row["head"], row["kind"], row["sentence"]) for row in rows] == [
        (row.layer, row.head, row.kind, row.sentence) for row in table
    ]
    for row, one in zip(rows, table, strict=True):
        for name, score in one.scores.items():
            assert row["scores"][name]["mean"] == pytest.approx(score)
            assert row["scores"][name]["count"] == score.count
            if name not in ("heavy", "positional"):  # no means of queries, but of two documents
                assert score.count == B * T or name in ("previous token", "duplicate", "induction")
            assert row["scores"][name]["low"] <= score <= row["scores"][name]["high"]


def weight_on_second_key(m):
    """The weight on the second key."""
    return m[:, :, :, 1]


def largest_weight(m):
    """The largest weight of a head."""
    return m.dense().amax((2, 3))


def test_a_users_own_scores_are_columns_with_intervals_and_their_docstrings():
    m = maps(1)[0]
    table = heads(Recorded([m], tokens=WORDS), scores=[weight_on_second_key, largest_weight])
    close(tensor_of(row.scores["weight on second key"] for row in table), m.dense()[..., 1].mean(2).mean(0))
    close(tensor_of(row.scores["largest weight"] for row in table), m.dense().amax((2, 3)).mean(0))
    assert {row.scores["weight on second key"].count for row in table} == {B * T}
    assert table.definitions["largest weight"] == "The largest weight of a head."
    assert table.sort_by("largest weight")[0].scores["largest weight"] == max(row.scores["largest weight"] for row in table)


@pytest.mark.parametrize("wrong", [lambda m: m.dense(), lambda m: 1.0, "a name", weight_on_second_key.__name__])
def test_a_users_score_that_is_no_score_is_refused(wrong):
    with pytest.raises(ConfigError, match="docstring"):
        heads(Recorded(maps(1)), scores=[wrong])


def test_a_users_score_of_another_shape_is_refused():
    def return_matrix(m):
        """The matrix."""
        return m.dense()

    with pytest.raises(ShapeError, match=r"'return matrix' must be a tensor \(b, h\)"):
        heads(Recorded(maps(1)), scores=[return_matrix])


def name_score(name):
    def score(m):
        """A number of no meaning."""
        return m.mass(slice(1))

    score.__name__ = name
    return score


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"scores": [name_score("induction")]}, "induction"),
        ({"scores": [name_score("previous_token")]}, "previous token"),
        ({"scores": [name_score("first_value")]}, "first value"),
        ({"scores": [name_score("mine"), name_score("mine")]}, "mine"),
        ({"scores": [name_score("animals")], "classes": {"animals": lambda word: word == "dog"}}, "animals"),
        ({"classes": {"local": lambda word: word == "dog"}}, "local"),
    ],
)
def test_a_users_score_that_has_the_name_of_another_is_refused(given, name):
    with pytest.raises(ConfigError, match=f"already a score '{name}'"):
        heads(Recorded(maps(1), tokens=WORDS), **given)


def test_a_table_sorts_picks_and_counts():
    names, m, tokens = make_planted_map(64)
    found = heads(Recorded([m]), tokens=tokens)
    assert found.sort_by("distance")[0].scores["distance"] == max(row.scores["distance"] for row in found)
    assert repr(found).startswith(f"Heads({len(found)} heads: ")
    assert repr(found.select_kind("prefix matching")) == "Heads(1 head: 1 prefix matching)"
    assert repr(found.select_kind("local")) == "Heads(0 heads)"
    titles = str(found).splitlines()[0].split()[2:]  # of the columns
    for title, name in zip(titles, found.detectors, strict=False):
        assert found.sort_by(title).rows == found.sort_by(name).rows
    assert [row.head for row in found.select_kind("prefix matching")] == [names.index("prefix matching")]
    assert len(found.select_kind("local")) == 0
    assert str(found.select_kind("local"))
    with pytest.raises(ConfigError, match="the scores are previous token, itself"):
        found.sort_by("inductoin")


def test_heads_without_a_score_are_sorted_last():
    found = heads(Recorded(maps(1, Causal() & Padding([0, 0])) + maps(1)), layers=[0, 1])
    ranked = found.sort_by("entropy")
    assert [row.layer for row in ranked] == [1] * H + [0] * H
    assert ranked[-1].kind == "unclear"
    assert " - " in str(found)


def test_the_printed_table_fits_80_columns():
    text = str(heads(Recorded(maps(), tokens=WORDS), classes={"a class with a long name": torch.ones(T).bool()}))
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert max(map(len, str(heads(Recorded(maps()))).splitlines())) <= 80  # with a note of 127 letters
    assert lines[0].split() == ["head", "kind", "prev", "self", "dup", "ind", "first", "sink", "local", "dist", "keys", "heavy"]
    assert lines[1].startswith("0.0   broad  ")
    assert "a class with a long name" in " ".join(lines[1 + 2 * H :])


def test_a_data_frame_has_a_line_for_each_head(monkeypatch):
    pandas = types.ModuleType("pandas")
    pandas.DataFrame = list
    monkeypatch.setitem(sys.modules, "pandas", pandas)
    found = heads(Recorded(maps(1)))
    lines = found.to_pandas()
    plain = {"layer": 0, "name": "layer.0", "head": 3, "kind": found[3].kind, "sentence": found[3].sentence}
    scores = found[3].scores
    limits = {f"{name} {end}": getattr(score, end) for name, score in scores.items() for end in ("low", "high", "count")}
    assert lines[3] == pytest.approx(plain | dict(scores) | limits, nan_ok=True)


def test_each_layer_has_its_own_projection():
    values = [torch.randn(B, G, T, 5).double() for _ in range(2)]
    first, second = torch.randn(2, H, 5, 3).double()
    found = heads(Recorded(maps(2), values=values), projections=[first, second], layers=[1, 0])
    for n, (layer, projection) in enumerate(((1, first), (0, second))):
        expected = weight_by_norm(maps(2)[layer], values[layer], projection).weight_on_first().mean(0)
        close(tensor_of(row.scores["first by norm"] for row in found)[n * H : (n + 1) * H], expected)
