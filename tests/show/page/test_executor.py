import threading

import regard
from regard.show.page import executor
from show.page.server_client import join_server_threads, open_client

HEAD = {"kind": "self", "b": 0, "layer": 1, "head": 2}


def test_no_more_is_computed_at_a_time_than_there_is_room_for(recording, monkeypatch):
    monkeypatch.setattr(executor, "MAX_REQUESTS", 2)
    inside, go_on = threading.Semaphore(0), threading.Event()
    cell = regard.show.page.exact_weights.get_cell

    def slowly(*given):
        inside.release()
        go_on.wait(30)
        return cell(*given)

    monkeypatch.setattr(regard.show.page.exact_weights, "get_cell", slowly)
    with open_client(recording) as client:
        asked = [threading.Thread(target=client.json, args=("/api/r/r1/cell",), kwargs={"q": 1, "k": 0}) for _ in range(2)]
        for one in asked:
            one.start()
            assert inside.acquire(timeout=30)
        status, sentence = client.expect_refusal("/api/r/r1/cell", q=1, k=0)
        assert (status, "try again" in sentence) == (503, True)
        go_on.set()
        for one in asked:
            one.join()
        assert client.json("/api/r/r1/cell", q=1, k=0)


def test_an_answer_that_takes_too_long_is_given_up(recording, monkeypatch):
    monkeypatch.setattr(executor, "ANSWER_SECONDS", 0.05)
    go_on = threading.Event()
    monkeypatch.setattr(regard.show.page.exact_weights, "get_cell", lambda *_: go_on.wait(30) and {})
    with open_client(recording) as client:
        assert client.expect_refusal("/api/r/r1/cell", q=1, k=0)[0] == 504
        go_on.set()


def test_a_server_that_has_stopped_leaves_no_thread(recording):
    before = set(threading.enumerate())
    with join_server_threads(), open_client(recording) as client:
        client.lines("/api/r/r1/open", **HEAD)
        assert any(one.name.startswith("regard-page-long") for one in set(threading.enumerate()) - before)
