import contextlib
import socket
import time

import pytest
import torch

from regard.show.page import timeouts
from show.page.server_client import open_client, record_sorter, rows_and_keys, wait_until

HEAD = b"GET /api/start HTTP/1.1\r\nHost: localhost\r\n"
POST = b"POST /api/type HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
LONG = {"REQUEST_SECONDS": 600, "BODY_SECONDS": 600, "DRAIN_SECONDS": 600}


@pytest.fixture
def set_limits(monkeypatch):
    """set_limits(NAME=seconds): every other limit is too far away to be met, so that each test is of one of them."""
    monkeypatch.setattr(timeouts, "CHECK_SECONDS", 0.05)

    def limit(**seconds):
        for name, value in {**LONG, **seconds}.items():
            monkeypatch.setattr(timeouts, name, value)

    return limit


@pytest.fixture
def client():
    with open_client(record_sorter()) as found:
        yield found


def is_dropped(connection):
    """Whether the other side ends the connection, before this side's patience does."""
    try:
        while connection.recv(2**16):
            pass
    except ConnectionError:
        pass
    return True


def not_heard(connection, data):
    """Whether sending letter by letter is refused before the end."""
    try:
        for letter in data:
            connection.sendall(bytes([letter]))
            time.sleep(0.01)
    except ConnectionError:
        return True
    return False


def took(connection, count):
    """Takes so many bytes, if they come, and says how many did."""
    with contextlib.suppress(ConnectionError):
        return len(connection.recv(count))
    return 0


@pytest.mark.slow
def test_a_client_that_says_nothing_is_dropped(client, set_limits):
    set_limits(REQUEST_SECONDS=0.3)
    with client.connect() as one:
        assert is_dropped(one)


@pytest.mark.slow
def test_a_client_that_sends_its_head_letter_by_letter_is_dropped(client, set_limits):
    set_limits(REQUEST_SECONDS=0.3)
    with client.connect() as one:
        assert not_heard(one, HEAD * 100)


@pytest.mark.slow
def test_a_client_that_does_not_send_the_body_it_promised_is_dropped(client, set_limits):
    set_limits(BODY_SECONDS=0.3)
    with client.connect() as one:
        one.sendall(POST + b"Content-Length: 99\r\n\r\n{")
        assert is_dropped(one)


@pytest.mark.slow
def test_a_client_that_takes_nothing_of_its_answers_is_dropped(set_limits):
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, 600, 5, generator=generator) for _ in range(2))
    with open_client(rows_and_keys(q, k)) as client:
        set_limits(DRAIN_SECONDS=0.3)
        one = socket.socket()
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.connect((client.address.hostname, client.address.port))
        with one:
            one.sendall(b"GET /api/r/r1/tile?level=0&row=1&column=0 HTTP/1.1\r\nHost: localhost\r\n\r\n" * 64)
            state = client.server._server.server_state
            wait_until(lambda: state.connections)
            wait_until(lambda: not state.connections)


@pytest.mark.slow
def test_a_client_that_takes_an_answer_a_little_at_a_time_is_dropped(set_limits):
    recording = rows_and_keys(*torch.randn(2, 1, 1, 5000, 1, generator=torch.Generator().manual_seed(0)))
    recording.tokens = [f"{n:064}" for n in range(5000)]
    path = "/api/r/r1/words?list=words&from=0&to=5000"
    with open_client(recording) as client:
        whole = len(client.ask(path)[2])
        set_limits(DRAIN_SECONDS=0.3)
        client.server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # what waits for it waits in the server
        one = socket.socket()
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.connect((client.address.hostname, client.address.port))
        with one:
            one.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            state = client.server._server.server_state
            wait_until(lambda: state.connections)
            had = [0]
            wait_until(lambda: had.append(took(one, 1000)) or not state.connections)
        assert 0 < sum(had) < whole


@pytest.mark.parametrize("size", [17_000, 60_000, 10_000_000])
def test_a_head_that_is_too_large_is_refused(client, size):
    with client.connect() as one:
        try:
            one.sendall(HEAD + b"X: " + b"a" * size + b"\r\n\r\n")
            assert one.recv(2**16).split()[1] in (b"400", b"431")
        except ConnectionError:  # dropped while it was still sending
            pass
    assert client.json("/api/start")


def test_a_head_that_does_not_end_is_not_kept_for_long(client, set_limits):
    set_limits()
    with client.connect() as one, contextlib.suppress(ConnectionError):
        one.sendall(HEAD + b"X: " + b"a" * 300_000)
        assert one.recv(2**16).split()[1] == b"400"


def test_more_connections_than_there_is_room_for_are_closed(client, monkeypatch):
    monkeypatch.setattr(timeouts, "MAX_CONNECTIONS", 3)
    state = client.server._server.server_state
    kept = [client.connect() for _ in range(3)]
    wait_until(lambda: len(state.connections) == 3)
    with client.connect() as one:
        assert is_dropped(one)
    wait_until(lambda: len(state.connections) == 3)
    for one in kept:
        one.close()
    wait_until(lambda: not state.connections)
    assert client.json("/api/start")
