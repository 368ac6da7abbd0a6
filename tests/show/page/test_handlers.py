import pytest
import torch

import regard
from regard import Causal
from regard.map.codes import encode_weights
from show.page.server_client import TEXT, open_client, record_sorter, rows_and_keys

HEAD = {"kind": "self", "b": 0, "layer": 1, "head": 2}


def weights(recording, layer=1, head=2):
    return recording.map(layer, head)[0, 0]


def test_the_start_says_what_there_is(client, recording):
    start = client.json("/api/start")
    assert start["model"] == "sorter"
    assert start["writes"] is True
    assert start["version"] == regard.__version__
    assert [one["name"] for one in start["examples"]][:2] == ["simple", "trainable"]
    assert len(start["sentences"]) == 3
    summary = start["recordings"][0]
    assert [summary["id"]] == client.ids
    assert summary["text"] == TEXT
    assert summary["words"]["words"] == {"count": 11, "first": list(TEXT)}
    assert summary["values"] is True
    attention = summary["attentions"][0]
    assert (attention["kind"], attention["part"], attention["rows"], attention["columns"]) == ("self", None, "words", "words")
    expected = [{"name": name, "heads": 3, "queries": 11, "keys": 11} for name in recording.layers()]
    assert attention["layers"] == expected


def test_tiles_are_the_map_in_codes(client, recording):
    expected = encode_weights(weights(recording), Causal().table(11, 11).reshape(11, 11)).to(torch.int32)
    for how in ("mean", "max"):
        assert torch.equal(client.codes("/api/r/r1/tile", **HEAD, level=0, row=0, column=0, how=how), expected)


def test_rows_and_columns_are_the_map_in_codes(client, recording):
    seen = Causal().table(11, 11).reshape(11, 11)
    found = weights(recording)
    assert torch.equal(client.codes("/api/r/r1/row", **HEAD, q=7), encode_weights(found[7], seen[7]).to(torch.int32))
    assert torch.equal(client.codes("/api/r/r1/column", **HEAD, k=4), encode_weights(found[:, 4], seen[:, 4]).to(torch.int32))


def test_several_heads_are_their_mean(client, recording):
    mean = recording.map(1)[0, [0, 2]].mean(0)
    apart = client.codes("/api/r/r1/row", **HEAD, q=7, heads="0,2") - encode_weights(mean[7]).to(torch.int32)
    assert apart.abs().max() <= 1
    apart = client.codes("/api/r/r1/column", **HEAD, k=4, heads="0,2") - encode_weights(mean[:, 4]).to(torch.int32)
    assert apart.abs().max() <= 1


def test_a_cell_is_the_weight_to_every_digit_with_its_score_and_rank(client, recording):
    found, row = client.json("/api/r/r1/cell", **HEAD, q=7, k=4), weights(recording)[7]
    assert found["weight"] == pytest.approx(float(row[4]), rel=1e-14)
    assert found["rank"] == 1 + int((row > row[4]).sum())
    assert (found["of"], found["visible"]) == (8, True)
    scores = torch.tensor([client.json("/api/r/r1/cell", **HEAD, q=7, k=k)["score"] for k in range(8)], dtype=torch.float64)
    torch.testing.assert_close(scores.softmax(-1), row[:8], rtol=0, atol=1e-12)


def test_a_hidden_cell_has_no_score_and_no_rank(client):
    found = client.json("/api/r/r1/cell", **HEAD, q=4, k=7)
    assert found == {"weight": 0.0, "score": None, "rank": None, "of": 5, "visible": False}


def test_the_largest_of_a_row_and_of_a_column_come_with_their_words(client, recording):
    for axis, line in (("q", weights(recording)[7]), ("k", weights(recording)[:, 4])):
        values, places = line.topk(3)
        found = client.json("/api/r/r1/top", **HEAD, **{axis: 7 if axis == "q" else 4}, n=3)["found"]
        assert [one["place"] for one in found] == places.tolist()
        assert [one["weight"] for one in found] == pytest.approx(values.tolist(), rel=1e-12)
        assert [one["word"] for one in found] == [TEXT[place] for place in places.tolist()]


def test_half_a_surrogate_pair_and_markup_travel_as_they_are():
    recording = record_sorter()
    recording.tokens = ["</script>", "\ud800", "\0", "\u202e", *"ABCABCA"]
    recording.model = "\x1b]52;c;ZQ==\x07\ud800"
    with open_client(recording) as client:
        assert client.json("/api/start")["recordings"][0]["model"] == recording.model
        assert client.json("/api/start")["recordings"][0]["words"]["words"]["first"] == recording.tokens
        assert client.json("/api/r/r1/words")["words"] == recording.tokens
        assert client.json("/api/r/r1/top", **HEAD, k=0)["found"][0]["word"] in recording.tokens
        assert client.json("/api/r/r1/steps", **HEAD)["rows"] == recording.tokens


@pytest.mark.slow
@pytest.mark.parametrize("steps", [64, 8], ids=["all steps", "those of a row"])
def test_a_word_of_megabytes_is_its_beginning_everywhere(steps, monkeypatch):
    monkeypatch.setattr("regard.show.page.handlers.MAX_STEP_WORDS", steps)
    recording = record_sorter()
    recording.tokens = ["x" * 10_000_000] * 11
    with open_client(recording) as client:
        start = client.json("/api/start")["recordings"][0]
        assert start["words"]["words"]["first"] == ["x" * 256 + "…"] * 11
        for path in ("/api/start", "/api/r/r1/words", "/api/r/r1/top?q=5", "/api/r/r1/top?k=5", "/api/r/r1/steps?q=5"):
            status, _, body = client.ask(path)
            assert status == 200
            assert len(body) < 20_000
        assert client.lines("/api/r/r1/heads")[-1]["detectors"]


@pytest.mark.slow
def test_numbers_that_are_none_do_not_break_an_answer():
    q = torch.randn(1, 1, 7, 5, generator=torch.Generator().manual_seed(0))
    q[0, 0, 3, 0] = torch.nan
    with open_client(rows_and_keys(q, torch.randn(1, 1, 7, 5))) as client:
        assert client.json("/api/r/r1/cell", q=3, k=1) == {
            "weight": None,
            "score": None,
            "rank": None,
            "of": 4,
            "visible": True,
        }
        assert client.codes("/api/r/r1/row", q=3).tolist() == [0] * 7
        assert client.lines("/api/r/r1/open")[-1]["rows"]["entropy"][3] is None
