import math

import pytest
import torch

import regard
from regard import Causal, ConfigError
from regard.show.page import exact_weights
from regard.show.page.head_pictures import OpenedHead, make_thumbnails
from regard.show.page.recording_entry import HeadPlace, RecordingEntry
from regard.show.page.steps_json import compute_head_steps
from show.page.server_client import rows_and_keys

B, H, G, T, D = 2, 4, 2, 13, 5
PLACE = HeadPlace(b=1, head=2)


@pytest.fixture(scope="module")
def entry():
    generator = torch.Generator().manual_seed(0)
    q, k, bias = (
        torch.randn(shape, dtype=torch.float64, generator=generator) for shape in ((B, H, T, D), (B, G, T, D), (1, H, T, T))
    )
    bias[:, 2, 9, 3] = -torch.inf
    sinks = torch.randn(H, dtype=torch.float64, generator=generator)
    return RecordingEntry("r1", rows_and_keys(q, k, bias=bias, sinks=sinks, softcap=2.0))


def get_weights(entry):
    return entry.recording.map(0)[1]  # (h, q, k)


def test_a_cell_is_one_of_its_row(entry):
    row = get_weights(entry)[2, 9]
    for k in range(T):
        found = exact_weights.get_cell(entry, PLACE, 9, k)
        assert found["weight"] == pytest.approx(float(row[k]), rel=1e-12)
        assert found["of"] == 9  # ten, but for the one that the bias hides
        assert found["visible"] is (k <= 9 and k != 3)
        assert found["rank"] == (1 + int((row > row[k]).sum()) if found["visible"] else None)
        assert (found["score"] is None) is not found["visible"]


def test_a_column_is_the_mean_of_heads(entry):
    maps = [entry.get_map(place) for place in exact_weights.list_places(entry, PLACE, [3, 1])]
    weights, seen = exact_weights.get_column(maps, 3)
    torch.testing.assert_close(weights, get_weights(entry)[[3, 1], :, 3].mean(0), rtol=0, atol=1e-12)
    assert seen.tolist() == [q >= 3 for q in range(T)]


@pytest.mark.parametrize("number", [torch.finfo(torch.float64).min, -1e9])
def test_a_number_hides_a_key_only_where_it_has_no_weight(number):
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(B, n, T, D, dtype=torch.float64, generator=generator) for n in (H, G))
    causal = torch.ones(T, T, dtype=torch.bool).tril()
    shown = causal & (torch.arange(T) >= 3)  # the bias hides all keys from three queries on padding
    numbers = rows_and_keys(q, k, bias=torch.zeros(1, 1, T, T, dtype=torch.float64).masked_fill(~shown, number))
    entry, place = RecordingEntry("r1", numbers), HeadPlace(b=0, head=1)
    for query in (1, 7):
        weights, seen = exact_weights.get_row(entry, place, query)
        assert torch.equal(seen, weights > 0)
        assert torch.equal(seen, (shown if query >= 3 else causal)[query])
        cell = exact_weights.get_cell(entry, place, query, 5)
        assert cell["visible"] is bool(seen[5])
        assert cell["of"] == int(seen.sum())
    assert exact_weights.get_column([entry.get_map(place)], 1)[1].tolist() == [n in (1, 2) for n in range(T)]


def test_the_largest_have_their_places_and_none_is_zero():
    words = ["a", "b", "c", "d"]
    found = exact_weights.list_largest(torch.tensor([0.25, math.nan, 0.75, 0]), words, 4)
    assert found == [{"place": 2, "word": "c", "weight": 0.75}, {"place": 0, "word": "a", "weight": 0.25}]
    for n in (0, exact_weights.MAX_LARGEST + 1):
        with pytest.raises(ConfigError, match="n must be"):
            exact_weights.list_largest(torch.ones(4), words, n)


def test_the_weights_are_those_of_attend(entry):
    piece = entry.recording.calls[0].stored
    k = piece_keys = entry.recording.last.find_histories(0, "self", None)[0].keys[0]
    steps = regard.attend(piece.q, piece_keys, k, Causal(), bias=piece.bias, sinks=piece.sinks, softcap=2.0)
    torch.testing.assert_close(exact_weights.get_row(entry, PLACE, 9)[0], steps.weights[1, 2, 9], rtol=0, atol=1e-12)


def test_rows_tiles_small_pictures_and_steps_hide_the_same_keys_for_any_number_that_hides():
    generator = torch.Generator().manual_seed(2)
    q, k = torch.randn(2, 1, 3, 11, 5, generator=generator)
    hidden = torch.rand(1, 3, 11, 11, generator=generator) < 0.5
    hidden[..., 0] = False
    for number in (-1e9, torch.finfo(torch.float32).min, -math.inf):
        bias = torch.zeros(1, 3, 11, 11).masked_fill(hidden, number)
        own = RecordingEntry("r1", rows_and_keys(q, k, regard.Everything(), bias=bias))
        assert torch.equal(make_thumbnails(own, HeadPlace())[0] != 0, ~hidden[0])
        for head in range(3):
            place = HeadPlace(head=head)
            assert torch.equal(OpenedHead(own.get_map(place)).pyramid.codes(0, 0, 0) != 0, ~hidden[0, head])
            assert torch.equal(exact_weights.get_row(own, place, 4)[1], ~hidden[0, head, 4])
            steps = compute_head_steps(own, place, None, 64)
            assert torch.equal(torch.tensor(steps["visible"]), ~hidden[0, head])
            assert not torch.tensor(steps["bias"]).any()  # no number stands there whose color would be the only one


def test_a_query_of_which_a_bias_hides_every_key_shows_the_weights_that_it_has():
    q, k = torch.randn(2, 1, 1, 5, 3, generator=torch.Generator().manual_seed(1))
    bias = torch.zeros(1, 1, 5, 5)
    bias[..., 2, :] = bias[..., 4] = -1e9
    own = RecordingEntry("r1", rows_and_keys(q, k, regard.Everything(), bias=bias))
    expected = torch.ones(5, 5, dtype=torch.bool)
    expected[:, 4] = False
    expected[2] = True
    for seen in (
        OpenedHead(own.get_map(HeadPlace())).pyramid.codes(0, 0, 0) != 0,
        torch.stack([exact_weights.get_row(own, HeadPlace(), n)[1] for n in range(5)]),
        torch.tensor(compute_head_steps(own, HeadPlace(), None, 64)["visible"]),
    ):
        assert torch.equal(seen, expected)
