import http.client
import socket
import time

import pytest
import torch

from regard.show.page import patience
from show.page.asking import asking, recorded, rows_and_keys

HEAD = b"GET /api/start HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture
def client(monkeypatch):
    for name in ("ASKING_SECONDS", "SENDING_SECONDS", "TAKING_SECONDS"):
        monkeypatch.setattr(patience, name, 0.3)
    monkeypatch.setattr(patience, "EVERY_SECONDS", 0.05)
    with asking(recorded()) as found:
        yield found


def connected(client):
    return socket.create_connection((client.address.hostname, client.address.port), timeout=30)


def is_dropped(connection):
    """Whether the other side ends the connection, before this side's patience does."""
    try:
        while connection.recv(2**16):
            pass
    except ConnectionResetError:
        pass
    return True


def test_a_client_that_says_nothing_is_dropped(client):
    with connected(client) as one:
        assert is_dropped(one)


def test_a_client_that_sends_its_head_letter_by_letter_is_dropped(client):
    with connected(client) as one:
        try:
            for letter in HEAD * 100:
                one.sendall(bytes([letter]))
                time.sleep(0.01)
            pytest.fail("it was listened to for ever")
        except OSError:
            pass


def test_a_client_that_does_not_send_the_body_it_promised_is_dropped(client):
    with connected(client) as one:
        one.sendall(
            b"POST /api/type HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
        )
        assert is_dropped(one)


def test_a_client_that_does_not_take_its_answer_is_dropped(client):
    with asking(rows_and_keys(*many())) as large:
        one = socket.socket()
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.connect((large.address.hostname, large.address.port))
        with one:
            for _ in range(64):
                one.sendall(b"GET /api/r/r1/tile?level=0&row=1&column=0 HTTP/1.1\r\nHost: localhost\r\n\r\n")
            state = large.server._server.server_state
            for _ in range(3000):
                if not state.connections:
                    break
                time.sleep(0.01)
            assert not state.connections
        assert large.json("/api/start")


def many():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(1, 1, 600, 5, generator=generator), torch.randn(1, 1, 600, 5, generator=generator)


def test_a_client_that_is_quick_may_ask_again(client):
    connection = http.client.HTTPConnection(client.address.hostname, client.address.port, timeout=30)
    for _ in range(20):
        connection.request("GET", "/api/start")
        first = connection.sock
        assert connection.getresponse().read()
        assert connection.sock is first
        time.sleep(0.05)
    connection.close()


@pytest.mark.parametrize("size", [17_000, 60_000, 10_000_000])
def test_a_head_that_is_too_large_is_refused(client, size):
    with connected(client) as one:
        try:
            one.sendall(HEAD + b"X: " + b"a" * size + b"\r\n\r\n")
            assert one.recv(2**16).split()[1] in (b"400", b"431")
        except OSError:  # dropped while it was still sending
            pass
    assert client.json("/api/start")
