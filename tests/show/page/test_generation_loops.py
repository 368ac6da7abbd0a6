"""Loops that generation calls are compiled once, and a visitor who waits for them is told."""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from regard.show.page import generation_loops
from regard.show.page.executor import LONG_THREADS
from regard.show.page.generation_loops import GenerationLoops
from regard.show.page.session import GenerationRequest, Session
from show.page.server_client import make_sorter, make_writer, open_client, wait_until


@pytest.fixture
def compiling(monkeypatch):
    """The compilation of any model's loops, not done before the test says so."""
    found = Future()
    monkeypatch.setattr(generation_loops, "start_compilation", lambda model: found)
    monkeypatch.setattr(generation_loops, "PATIENCE_SECONDS", 0.05)
    yield found
    if not found.done():
        found.set_result(None)


def test_a_visitor_is_told_what_the_first_words_wait_for(compiling):
    lines = Session(None, make_writer()).generate_text(GenerationRequest("CCAB", 3, 1.0), lambda: None)
    assert next(lines) == {"compiling": True}
    compiling.set_result(None)
    *words, last = lines
    assert [one["place"] for one in words] == [4, 5, 6]
    assert "recording" in last


def test_who_waits_for_loops_and_goes_away_waits_no_longer(compiling):
    asked = {"text": "CCAB", "tokens": 5, "temperature": 1}
    with open_client(adapter=make_writer()) as client:
        for _ in range(LONG_THREADS):
            with client.leaving("/api/generate", asked) as asking, asking.makefile("rb") as answer:
                wait_until(lambda answer=answer: b"compiling" in answer.readline())
        assert client.post("/api/type", {"text": "CCAB"})[0] == 200  # by one of their threads
        assert not compiling.done()


def test_the_model_is_free_for_others_while_one_waits_for_loops(compiling):
    session = Session(None, make_writer())
    assert next(session.generate_text(GenerationRequest("CCAB", 3, 1.0), lambda: None)) == {"compiling": True}
    assert not session._model_lock.is_held


def test_the_loops_of_a_model_are_compiled_once(monkeypatch):
    asked = []
    monkeypatch.setattr(generation_loops, "start_compilation", lambda model: asked.append(model) or Future())
    loops, adapter = GenerationLoops(), make_sorter()
    assert not loops.is_compiling()
    assert loops.compile(adapter) is loops.compile(adapter)
    assert loops.is_compiling()
    assert loops.compile(SimpleNamespace(name="another", model=adapter.model)) is None  # it says nothing of how it generates
    assert asked == [adapter.model]
