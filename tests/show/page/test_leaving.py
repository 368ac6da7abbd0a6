"""A client that goes away stops what is computed for it: each kind of work is held at its beginning until it has gone."""

import json
import threading

import pytest
import torch

import regard
from regard.models.gpt2_adapter import GPT2Adapter
from regard.observe.classification import head_classification
from regard.show.page import model_adapter
from show.page.server_client import join_server_threads, make_sorter, open_client, record_sorter, rows_and_keys, wait_until

STRIPS = 13


class Held:
    """Work that waits, where it is first done, until it may go on, and counts how often it is done."""

    def __init__(self, work) -> None:
        self.work, self.times = work, 0
        self.begun, self.go_on = threading.Event(), threading.Event()

    def __call__(self, *given, **more):
        self.times += 1
        self.begun.set()
        self.go_on.wait(60)
        return self.work(*given, **more)


def ask_and_leave(client, held, path, sent=None):
    """Asks, goes away while the work is held, and lets it go on when the server has seen that."""
    with client.leaving(path, sent):
        assert held.begun.wait(60)
    client.idle()
    held.go_on.set()


def model_held(name: str):
    """The sorter, and one of its modules, which is held."""
    own = GPT2Adapter("held", make_sorter().model)
    held = Held(lambda *_: None)
    own.model.get_submodule(name).register_forward_pre_hook(held)
    return own, held


@pytest.mark.parametrize("path", ["open?", "tile?level=0&row=0&column=0&", "column?k=1&", "top?k=1&"])
def test_a_head_that_is_gone_over(path, monkeypatch):
    monkeypatch.setattr(regard.map.pyramid, "traverse_plane", held := Held(regard.map.pyramid.traverse_plane))
    monkeypatch.setattr(regard.map.pyramid, "STRIP", 8)
    q = torch.randn(1, 1, 97, 5, generator=torch.Generator().manual_seed(0))
    with open_client(rows_and_keys(q, q)) as client:
        ask_and_leave(client, held, f"/api/r/r1/{path}")
        wait_until(lambda: not any(one.is_busy() for one in client.server.page.session._opened.values()))
        assert held.times == 1
        assert client.lines("/api/r/r1/open")[-1]["levels"] == 1  # who comes next goes on from there
        assert held.times == STRIPS


def test_what_kind_heads_are(monkeypatch):
    monkeypatch.setattr("regard.show.page.head_table.MAX_LAYER_WEIGHTS", 0)
    monkeypatch.setattr(head_classification, "estimate_heads", held := Held(head_classification.estimate_heads))
    with join_server_threads(), open_client(record_sorter()) as client:
        ask_and_leave(client, held, "/api/r/r1/heads")
    assert held.times == 1


@pytest.mark.parametrize(("path", "more"), [("type", {}), ("generate", {"tokens": 5, "temperature": 1})])
def test_a_model_in_the_middle_of_what_it_reads(path, more):
    own, held = model_held("blocks.0")
    after = []
    own.model.get_submodule("blocks.1").register_forward_hook(lambda *_: after.append(1))
    with open_client(record_sorter(), adapter=own) as client:
        ask_and_leave(client, held, f"/api/{path}", {"text": "CCAB", **more})
        wait_until(lambda: not client.server.page.session._model_lock.is_held)
        assert (held.times, after) == (1, [])
        assert [one["id"] for one in client.json("/api/start")["recordings"]] == client.ids
        assert client.post("/api/type", {"text": "CCAB"})[0] == 200
        assert after == [1]


def test_a_model_that_is_asked_who_sees_whom():
    own, held = model_held("blocks.0")
    held.go_on.set()
    with open_client(own) as client:
        path = f"/api/r/{json.loads(client.post('/api/type', {'text': 'CCAB'})[1])['id']}/examination"
        for one in (held.begun, held.go_on):
            one.clear()
        before, after = [], []  # also of a copy of the model, which examine may call
        own.model.get_submodule("blocks.0").register_forward_pre_hook(lambda *_: before.append(1))
        own.model.get_submodule("blocks.1").register_forward_hook(lambda *_: after.append(1))
        ask_and_leave(client, held, path, {"sees": "earlier"})
        wait_until(lambda: not client.server.page.session._model_lock.is_held)
        assert (before, after) == ([1], [])
        assert client.post(path, {"sees": "earlier"})[0] == 200
        assert after


def test_a_model_that_writes(monkeypatch):
    held = Held(lambda step: step)
    describe = model_adapter.describe_tokens
    monkeypatch.setattr(model_adapter, "describe_tokens", lambda steps, *given: describe(map(held, steps), *given))
    with open_client(record_sorter(), adapter=make_sorter()) as client:
        ask_and_leave(client, held, "/api/generate", {"text": "CCAB", "tokens": 5, "temperature": 1})
        wait_until(lambda: not client.server.page.session._model_lock.is_held)
        assert held.times == 1
        assert [one["id"] for one in client.json("/api/start")["recordings"]] == client.ids


def test_a_model_that_takes_long_for_each_token(monkeypatch):
    monkeypatch.setattr(model_adapter, "SLOW_STEP", 0.0)
    own, held = model_held("blocks.0")
    held.go_on.set()
    after = []

    def hold_second_token(*_: object) -> None:
        if held.times == 1:
            held.begun.clear()
            held.go_on.clear()

    own.model.get_submodule("blocks.1").register_forward_hook(lambda *_: after.append(1))
    own.model.register_forward_hook(hold_second_token)
    with open_client(record_sorter(), adapter=own) as client:
        with client.leaving("/api/generate", {"text": "CCAB", "tokens": 5, "temperature": 1}):
            wait_until(lambda: held.times == 2)
        client.idle()
        held.go_on.set()
        wait_until(lambda: not client.server.page.session._model_lock.is_held)
        assert (held.times, len(after)) == (2, 1)  # it stopped within the forward of the second token


def test_a_model_that_reads_what_it_wrote(monkeypatch):
    own, after = GPT2Adapter("held", make_sorter().model), []
    own.model.get_submodule("blocks.0").register_forward_hook(lambda *_: after.append(1))
    monkeypatch.setattr(model_adapter, "record_rest", held := Held(model_adapter.record_rest))
    with open_client(record_sorter(), adapter=own) as client:
        ask_and_leave(client, held, "/api/generate", {"text": "CCAB", "tokens": 5, "temperature": 1})
        wait_until(lambda: not client.server.page.session._model_lock.is_held)
        assert (held.times, len(after)) == (1, 5)  # forwards of the tokens, and none over the text
        assert list(client.server.page.session._entries) == client.ids
        assert client.post("/api/generate", {"text": "CCAB", "tokens": 5, "temperature": 1})[0] == 200
        assert len(after) == 5 + 5 + 1


@pytest.mark.slow
def test_who_waits_for_the_model_and_goes_away_waits_no_longer():
    own, held = model_held("blocks.0")
    with (
        join_server_threads(),
        open_client(record_sorter(), adapter=own) as client,
        client.leaving("/api/type", {"text": "CCAB"}),
    ):
        assert held.begun.wait(60)
        page = client.server.page
        with client.leaving("/api/type", {"text": "AB"}):
            wait_until(lambda: page.executor.request_count == 2)
        wait_until(lambda: page.executor.request_count == 1)
        held.go_on.set()
        client.idle()
    assert held.times == 1
