import json

import pytest
import torch

from bounds import assert_within, softmax_bound
from regard import GPT2, Causal, GPT2Config
from regard.map.codes import encode_weights
from regard.models.gpt2_adapter import GPT2Adapter
from regard.show.page.model_adapter import generate_tokens, record_text
from regard.text import BytePair
from show.implicit_recordings import make_mamba_adapter
from show.page.server_client import make_sorter, open_client, record_sorter

HEAD = {"kind": "self", "b": 0, "layer": 1, "head": 2}


def test_typing_runs_the_model(client):
    status, body = client.post("/api/type", {"text": "CCAB"})
    found = json.loads(body)
    assert status == 200
    model = make_sorter(torch.float64).model
    logits = model(torch.tensor([model.text.encode("CCAB")]))[0, -1]
    expected, places = logits.softmax(-1).sort(descending=True)
    assert [one["word"] for one in found["next"]] == ["ABC"[n] for n in places.tolist()]
    told = torch.tensor([one["probability"] for one in found["next"]])
    assert_within(told, expected, softmax_bound(torch.float32, logits[places]))  # whatever the model computes in
    place = {**HEAD, "level": 0, "row": 0, "column": 0}
    seen = client.codes(f"/api/r/{found['id']}/tile", **place)
    assert torch.equal(
        seen, encode_weights(record_sorter("CCAB").map(1, 2)[0, 0], Causal().table(4, 4).reshape(4, 4)).to(torch.int32)
    )


def test_generating_streams_tokens_and_ends_with_their_recording(client):
    status, _, body = client.ask(
        "/api/generate", "POST", b'{"text":"CCAB","tokens":3,"temperature":0}', content_type="application/json"
    )
    *tokens, last = [json.loads(line) for line in body.splitlines()]
    assert status == 200
    assert "".join(one["word"] for one in tokens) == "".join(
        make_sorter(torch.float64).model.complete("CCAB", 3, temperature=0)
    )
    assert [one["place"] for one in tokens] == [4, 5, 6]
    assert all(one["likeliest"][0]["probability"] == pytest.approx(one["probability"], rel=1e-12) for one in tokens)
    whole = "CCAB" + "".join(one["word"] for one in tokens)
    for looked in last["looked"]:
        assert [near["word"] for near in looked] == [whole[near["place"]] for near in looked]
        assert sum(near["weight"] for near in looked) <= 1 + 1e-12
    assert client.json(f"/api/r/{last['recording']['id']}/story")["lines"] == [
        {**one, "looked": looked} for one, looked in zip(tokens, last["looked"], strict=True)
    ]
    assert last["recording"]["words"]["words"]["first"] == list("CCAB") + [one["word"] for one in tokens[:-1]]
    assert client.codes(f"/api/r/{last['recording']['id']}/row", **HEAD, q=5).shape == (6,)


def test_a_text_that_does_not_fit_or_is_cut_into_bytes_has_a_note_on_it():
    own = GPT2Adapter("GPT-2", GPT2(GPT2Config(layers=1, heads=1, width=8, context=7, vocabulary=50257)).eval())
    own.model.text = BytePair.gpt2()
    for text, notes in (
        ("one two three", []),
        ("one " * 9, ["The first 7 of 10 tokens were read, as many as fit."]),
        ("\U0001faa8", ["Letters that the model has no tokens for are read byte by byte"]),
    ):
        found = record_text(own, text, 2048).notes
        assert [note.startswith(start) for note, start in zip(found, notes, strict=True)] == [True] * len(notes)


def test_a_page_without_a_model_says_so(recording):
    with open_client(recording) as client:
        assert client.json("/api/start")["model"] is None
        status, body = client.post("/api/type", {"text": "CCAB"})
        assert (status, "no model" in json.loads(body)["error"]) == (400, True)


def test_what_the_tokens_of_a_model_without_a_softmax_took_is_the_mean_of_its_entries():
    steps = generate_tokens(make_mamba_adapter(), "w3 w4 w5", 2, 0.0, None, lambda: None)
    assert [next(steps)["place"] for _ in range(2)] == [3, 4]
    found = next(steps)
    matrix = found.recording.map(1, kind="implicit").dense()[0].double().mean(0)  # of the last of two layers
    for row, listed in zip(matrix[2:], found.looked, strict=True):
        order = sorted(range(len(row)), key=lambda place: -abs(float(row[place])))
        assert [near["place"] for near in listed] == order[: len(listed)]
        assert [near["weight"] for near in listed] == pytest.approx([float(row[near["place"]]) for near in listed], rel=1e-5)
    assert min(near["weight"] for row in found.looked for near in row) < 0
