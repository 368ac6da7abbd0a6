import json
import threading
import time
from contextlib import ExitStack

import pytest

from regard.show.page import executor, model_adapter, ndjson
from regard.show.page.executor import LONG_THREADS, DisconnectedError
from show.page.server_client import join_server_threads, make_sorter, make_writer, open_client, wait_until


@pytest.fixture
def slowly(monkeypatch):
    """Opening a head says that a half is done, and then waits."""
    go_on = threading.Event()

    def opening(*_):
        yield {"done": 0.5}
        go_on.wait(60)
        yield {"done": 1}

    monkeypatch.setattr("regard.show.page.routes.stream_head", opening)
    yield go_on
    go_on.set()


def test_lines_come_one_by_one(recording, slowly):
    with open_client(recording) as client, client.leaving("/api/r/r1/open") as one:
        found = b""
        while b'{"done":0.5}\n' not in found:
            found += one.recv(2**16)
        assert b'{"done":1}' not in found
        assert b"content-type: application/x-ndjson" in found
        assert b"cache-control: no-store" in found
        slowly.set()
        while b'{"done":1}\n' not in found:
            found += one.recv(2**16)


def test_a_stream_that_takes_too_long_ends_with_a_sentence(recording, slowly, monkeypatch):
    monkeypatch.setattr(ndjson, "MAX_STREAM_SECONDS", 0.05)
    with join_server_threads(), open_client(recording) as client:
        status, _, body = client.ask("/api/r/r1/open")
        assert "takes longer" in json.loads(body.splitlines()[-1])["error"]
        assert status in (200, 504)  # as the first line came before or not
        slowly.set()
        client.idle()


def test_no_more_is_computed_for_a_client_that_has_gone(recording, monkeypatch):
    begun, go_on, computed = threading.Event(), threading.Event(), []

    def opening(*_):
        for n in range(5):
            computed.append(n)
            begun.set()
            go_on.wait(60)
            yield {"done": n}

    monkeypatch.setattr("regard.show.page.routes.stream_head", opening)
    with join_server_threads(), open_client(recording) as client:
        with client.leaving("/api/r/r1/open"):
            assert begun.wait(60)
        client.idle()
        go_on.set()
    assert computed == [0]


def test_clients_that_do_not_read_hold_no_thread(recording, monkeypatch):
    monkeypatch.setattr("regard.show.page.routes.stream_head", lambda *_: ({"done": "a" * 2**16} for _ in range(200)))
    with open_client(recording, adapter=make_sorter()) as client, ExitStack() as stack:
        for _ in range(LONG_THREADS):
            stack.enter_context(client.leaving("/api/r/r1/open"))
        wait_until(lambda: client.server.page.executor.request_count == LONG_THREADS)
        assert client.post("/api/type", {"text": "CCAB"})[0] == 200
        assert client.server.page.executor.request_count == LONG_THREADS


def test_texts_that_nobody_reads_keep_no_visitor_waiting(monkeypatch):
    describe = model_adapter.describe_tokens
    monkeypatch.setattr(model_adapter, "describe_tokens", lambda steps, *more: describe(slow_down(steps), *more))
    monkeypatch.setattr(executor, "MAX_TEXTS", 2)
    text = {"text": "CCAB", "tokens": 300, "temperature": 1}
    with join_server_threads(), open_client(adapter=make_writer()) as client, ExitStack() as stack:
        unread = [stack.enter_context(client.leaving("/api/generate", text)) for _ in range(5)]
        for oldest in unread[:3]:
            with oldest.makefile("rb") as answer:
                assert any(b"newer texts" in line for line in answer)
        texts = client.server.page.executor.texts
        wait_until(lambda: len(texts) == 2)
        assert (client.post("/api/type", text)[0], len(texts)) == (200, 2)  # both are written still
        assert (client.post("/api/generate", text | {"tokens": 5})[0], len(texts) > 0) == (200, True)


def slow_down(steps):
    """Steps that take 50 ms each: 15 s for a text of 300."""
    for step in steps:
        time.sleep(0.05)
        yield step


def test_what_fails_before_the_first_line_has_its_status(client):
    status, headers, body = client.ask(
        "/api/generate", "POST", b'{"text":"XYZ","tokens":3,"temperature":1}', content_type="application/json"
    )
    assert (status, headers["content-type"]) == (400, "application/json")
    assert "not a letter" in json.loads(body)["error"]


def test_what_fails_later_is_the_last_line(recording, monkeypatch, caplog):
    def opening(*_):
        yield {"done": 0.5}
        raise ZeroDivisionError("inside")

    monkeypatch.setattr("regard.show.page.routes.stream_head", opening)
    with open_client(recording) as client:
        status, _, body = client.ask("/api/r/r1/open")
    first, last = map(json.loads, body.splitlines())
    assert (status, first) == (200, {"done": 0.5})
    assert list(last) == ["error"]
    assert "inside regard" in last["error"]
    assert "ZeroDivision" not in last["error"]
    assert "ZeroDivisionError" in caplog.text


def test_a_server_that_ends_ends_what_it_answers_and_does_not_wait_for_it(recording, monkeypatch):
    ended = threading.Event()

    def opening(*given):
        yield {"done": 0.5}
        try:
            wait_until(given[-1], 20)  # alive(), which is never true, until it raises
        except DisconnectedError:
            ended.set()
            raise

    monkeypatch.setattr("regard.show.page.routes.stream_head", opening)
    with join_server_threads(), open_client(recording) as client:
        client.server._server.config.timeout_graceful_shutdown = None  # uvicorn itself would wait for ever
        with client.leaving("/api/r/r1/open") as one:
            assert one.recv(1)
            client.server.stop()
    assert ended.is_set()
