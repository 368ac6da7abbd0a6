"""Who sees whom in the page's model: asked of the server on what was typed."""

import json

import pytest
import torch

from regard.models import GPT2
from regard.models.gpt2_adapter import GPT2Adapter
from show.page.leaky_models import LAYER, TEXT, WORDS, MuteSpeaker, make_leaky_model
from show.page.server_client import TEXT as GIVEN
from show.page.server_client import make_sorter, open_client, record_sorter
from show.page.translators import READ, train_small_translator


def type_text(client, text: str = TEXT) -> dict:
    """The summary of a recording of what is typed."""
    status, body = client.post("/api/type", {"text": text})
    assert status == 200, body
    return json.loads(body)


def examine_recording(client, name: str, sees: str = "earlier") -> tuple[int, dict]:
    """The status and the answer."""
    status, body = client.post(f"/api/r/{name}/examination", {"sees": sees})
    return status, json.loads(body)


def table(found: dict, name: str) -> torch.Tensor:
    return torch.tensor(found["reach"][name])


@pytest.mark.slow
def test_of_a_right_model_expected_and_found_are_the_words_so_far():
    with open_client(GPT2Adapter("pocket", GPT2.load("pocket"))) as client:
        summary = type_text(client)
        assert summary["examines"]
        status, found = examine_recording(client, summary["id"])
        assert (status, found["findings"], found["reach"]["words"]) == (200, [], WORDS)
        assert torch.equal(table(found, "expected"), torch.ones(12, 12).tril().bool())
        assert torch.equal(table(found, "found"), table(found, "expected"))
        _, found = examine_recording(client, summary["id"], "all")
        assert table(found, "expected").all()
        assert [one["kind"] for one in found["findings"]] == ["wrong mask"]
        assert found["sees"] == "all"
        _, found = examine_recording(client, type_text(client, "Once upon a time")["id"])
        assert found["reach"]["words"] == ["Once", " upon", " a", " time"]
        assert examine_recording(client, type_text(client, "the the")["id"])[1]["findings"] == []


@pytest.mark.slow
def test_a_layer_without_its_mask_is_named_and_every_later_word_is_found():
    with open_client(make_leaky_model()) as client:
        status, found = examine_recording(client, type_text(client)["id"])
        (finding,) = found["findings"]
        assert (status, finding["kind"]) == (200, "future leak")
        assert finding["evidence"].startswith(f"blocks.{LAYER}.attention: ")
        assert finding["cure"]
        assert table(found, "found").all()
        assert not table(found, "expected").triu(1).any()


def test_it_is_asked_of_what_was_typed_and_not_of_a_recording_from_elsewhere():
    with open_client(record_sorter(GIVEN), adapter=make_sorter()) as client:
        (given,) = client.json("/api/start")["recordings"]
        assert not given["examines"]
        status, found = examine_recording(client, given["id"])
        assert (status, "type a text" in found["error"]) == (404, True)
        assert examine_recording(client, "r99")[0] == 404
        status, found = examine_recording(client, type_text(client, GIVEN)["id"], "nobody")
        assert (status, found["error"]) == (400, "sees must be earlier or all, got 'nobody'.")
        assert client.ask("/api/r/r1/examination")[0] == 405


@pytest.mark.slow
def test_a_translator_of_two_texts_is_not_asked():
    with open_client(train_small_translator("transformer")) as client:
        summary = type_text(client, READ)
        assert not summary["examines"]
        assert examine_recording(client, summary["id"])[0] == 404


def test_of_a_model_whose_answer_is_no_tensor_the_layers_are_shown_and_the_rest_is_not_guessed():
    with open_client(MuteSpeaker()) as client:
        status, found = examine_recording(client, type_text(client)["id"])
        assert (status, found["reach"]) == (200, None)
        assert found["findings"][0]["evidence"].startswith("layer: row 0")
        assert found["unknown"]


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_in_the_mode_and_the_random_state_it_was_in(training):
    adapter = make_sorter()
    adapter.model.train(training)
    with open_client(adapter) as client:
        summary, before = type_text(client, "CCAB"), torch.get_rng_state()
        assert examine_recording(client, summary["id"])[0] == 200
    assert torch.equal(torch.get_rng_state(), before)
    assert adapter.model.training == training
