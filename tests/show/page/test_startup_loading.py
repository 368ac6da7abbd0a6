"""The server answers while its models are loaded, and says how far they are, or why they cannot be."""

import threading
from types import SimpleNamespace

import pytest

from regard import DataError
from regard.show.page import server as module
from regard.show.page.server import make_server
from regard.show.page.startup_loading import StartupLoading
from show.page.server_client import Client, make_sorter, wait_until


@pytest.fixture
def gate(monkeypatch):
    """An event for which loading waits; the server is made without waiting for it."""
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.0)
    found = threading.Event()
    yield found
    found.set()


def loading(gate, done: int = 0, total: int = 0, fails: bool = False) -> StartupLoading:
    def load():
        gate.wait(60)
        if fails:
            raise DataError("the file is damaged: choose another one.")
        return [make_sorter()]

    return StartupLoading(load, SimpleNamespace(label="the model sorter", done=done, total=total))


@pytest.mark.parametrize(("done", "total", "share"), [(0, 0, None), (3, 12, 0.25), (13, 12, 1.0)])
def test_the_start_says_how_far_the_models_are_loaded_and_then_has_them(gate, done, total, share):
    with make_server(loading=loading(gate, done, total), text="CAB") as running:
        client = Client(running)
        assert client.json("/api/start") == {"loading": {"label": "the model sorter", "share": share}}
        status, sentence = client.post("/api/type", {"text": "CAB"})
        assert (status, b"still loaded" in sentence) == (400, True)
        gate.set()
        wait_until(lambda: "loading" not in client.json("/api/start"))
        start = client.json("/api/start")
        assert (start["model"], [one["text"] for one in start["recordings"]]) == ("sorter", ["CAB"])
        assert client.post("/api/type", {"text": "CABB"})[0] == 200


def test_an_error_of_loading_is_shown_on_the_page_and_ends_the_server(gate, monkeypatch):
    monkeypatch.setattr(module, "FAILURE_SECONDS", 1.0)
    server, raised = make_server(loading=loading(gate, fails=True)), []

    def serve():
        try:
            server.run()
        except DataError as error:
            raised.append(str(error))

    thread = threading.Thread(target=serve)
    thread.start()
    wait_until(lambda: server._server.started)
    client = Client(server)
    assert "loading" in client.json("/api/start")
    gate.set()
    wait_until(lambda: client.ask("/api/start")[0] != 200)
    assert client.expect_refusal("/api/start") == (400, "the file is damaged: choose another one.")
    thread.join(60)
    server.stop()
    assert raised == ["the file is damaged: choose another one."]
