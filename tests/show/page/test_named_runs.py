"""A text that is stopped is shorter, and otherwise what a complete text of that length is."""

import json

import pytest

from regard.models import GPT2, GPT2Config
from regard.models.gpt2_adapter import GPT2Adapter
from regard.show.page.session import GenerationRequest, Session
from show.page.server_client import make_writer, open_client

ASKED = GenerationRequest("CCAB", 40, 1.0, seed=5, run="mine")


def write_and_stop(session: Session, words: int) -> list[dict]:
    """The lines of a text that is stopped once it has this many words."""
    lines = session.generate_text(ASKED, lambda: None)
    found = [next(lines) for _ in range(words)]
    assert session.runs.stop("mine")
    return [*found, *lines]


@pytest.mark.parametrize("words", [1, 7, 40])
def test_a_stopped_text_is_that_of_a_request_for_as_many_words(words):
    writer = make_writer()
    *lines, last = write_and_stop(Session(None, writer), words)
    asked = GenerationRequest("CCAB", words, 1.0, seed=5)
    *expected, whole = Session(None, writer).generate_text(asked, lambda: None)
    assert [one["token"] for one in lines] == [one["token"] for one in expected]
    assert last["recording"]["request"] == {"text": "CCAB", "tokens": words, "temperature": 1.0, "seed": 5}
    assert last["recording"]["request"] == whole["recording"]["request"]
    assert last["recording"]["id"] == whole["recording"]["id"]  # by which a link finds it
    assert [[near["place"] for near in row] for row in last["looked"]] == [
        [near["place"] for near in row] for row in whole["looked"]
    ]


def test_a_model_that_runs_one_block_several_times_is_read():
    model = GPT2(GPT2Config(layers=2, heads=2, width=8, context=64, vocabulary=3)).eval()
    model.text, model.blocks[1] = GPT2.load("sorter").text, model.blocks[0]
    *lines, last = Session(None, GPT2Adapter("one block", model)).generate_text(
        GenerationRequest("CCAB", 5, 1.0, seed=5), lambda: None
    )
    assert len(lines) == len(last["looked"]) == 5


def test_runs_are_stopped_by_their_own_names():
    with open_client(adapter=make_writer()) as client:
        runs = client.session.runs
        with runs.open("one") as one, runs.open("two") as two, runs.open(None):
            for name, stopped in (("two", True), ("three", False)):
                status, body = client.post("/api/stop", {"run": name})
                assert (status, json.loads(body)) == (200, {"stopped": stopped})
            assert (one.is_set(), two.is_set()) == (False, True)
        assert client.post("/api/stop", {"run": 3})[0] == 400
