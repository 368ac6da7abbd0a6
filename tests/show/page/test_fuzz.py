"""The server under thousands of requests that are none, or ask for what is not there: it goes on answering."""

import json
import random
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from show.page.asking import asking, recorded, sorter

PATHS = ["/", "/static/main.js", "/api/start", "/api/example", "/api/type", "/api/generate", "/api/translation"]
PATHS += [
    f"/api/r/r1/{name}"
    for name in ("words", "heads", "thumbs", "open", "tile", "cell", "row", "column", "top", "steps", "examination", "")
]
NAMES = [
    "kind",
    "part",
    "b",
    "layer",
    "head",
    "q",
    "k",
    "heads",
    "level",
    "row",
    "column",
    "how",
    "list",
    "from",
    "to",
    "n",
    "name",
]
VALUES = [
    "0",
    "1",
    "2",
    "-1",
    "99999999999999999999",
    "1e9",
    "NaN",
    "inf",
    "0x1",
    "٣",
    "",
    "%",
    "%zz",
    "%00",
    "%ff%fe",
    "a" * 3000,
    "self",
]
VALUES += [
    "cross",
    "../..",
    "<script>",
    "mean",
    "max",
    "words",
    "simple",
    "0,1",
    ",",
    "0," * 500,
    "1.5",
    "true",
    "null",
    "%F0%9F%98%80",
    "+",
]
METHODS = ["GET"] * 8 + ["POST", "HEAD", "PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT", "get", "G\0T", "X" * 300, ""]
BODIES = [
    b"",
    b"{}",
    b"[]",
    b"null",
    b"\xff",
    b'{"text":1}',
    b'{"text":"CCAB"}',
    b'{"text":"' + b"A" * 5000 + b'"}',
    b"{" * 5000,
]
BODIES += [
    b'{"text":"CCAB","tokens":-1,"temperature":1}',
    b'{"text":"CCAB","tokens":1e400,"temperature":1}',
    b'{"text":"\\ud800"}',
    b'{"sees":"all"}',
]
HEADS = [
    "Host: evil",
    "Origin: http://evil",
    "Origin: null",
    "Content-Length: -1",
    "Content-Length: 10",
    "Content-Length: 99999999999",
]
HEADS += [
    "Transfer-Encoding: chunked",
    "Transfer-Encoding: x",
    "Expect: 100-continue",
    "Upgrade: websocket\r\nConnection: Upgrade",
    "X",
]
HEADS += [
    ": y",
    "Accept-Encoding: gzip",
    "Connection: close",
    "X-Regard-Token: é",
    "A: " + "b" * 20_000,
    "Cookie: \0",
    "Range: bytes=0-1",
]
PLACES = [
    "/../../etc/passwd",
    "/static/../../server.py",
    "/%2e%2e/%2e%2e/etc/passwd",
    "//evil.example/",
    "/static/%00",
    "http://evil/",
    "*",
    "",
    "/" + "a/" * 2000,
]
TOGETHER, EACH = 8, 400


def request(draw: random.Random) -> bytes:
    """A request that is more or less wrong."""
    path = draw.choice(PATHS) if draw.random() < 0.85 else draw.choice(PLACES)
    query = "&".join(f"{draw.choice(NAMES)}={draw.choice(VALUES)}" for _ in range(draw.choice((0, 1, 3, 6))))
    body = draw.choice(BODIES) if draw.random() < 0.4 else b""
    posted = path in ("/api/type", "/api/generate", "/api/translation", "/api/r/r1/examination") and draw.random() < 0.8
    method, body = ("POST", draw.choice(BODIES)) if posted else (draw.choice(METHODS), body)
    lines = [f"{method} {path}{'?' * bool(query)}{query} HTTP/{draw.choice(('1.1', '1.1', '1.1', '1.0', '9', ''))}"]
    lines += ["Host: localhost"] * draw.choice((1, 1, 1, 1, 1, 0, 2))
    lines += [f"Content-Length: {len(body)}", "Content-Type: application/json"] * bool(body)
    lines += [draw.choice(HEADS) for _ in range(draw.choice((0, 0, 0, 1, 2)))]
    whole = "\r\n".join([*lines, "", ""]).encode("utf-8", "replace") + body
    for _ in range(draw.choice((0, 0, 0, 1, 3))):
        at = draw.randrange(len(whole))
        whole = whole[:at] + bytes([draw.randrange(256)]) + whole[at + 1 :]
    return whole[: draw.randrange(len(whole))] if draw.random() < 0.1 else whole


def asked(address, seed: int) -> list[bytes]:
    """What came back to many requests, each on its own connection, some of which are closed at once."""
    draw, found = random.Random(seed), []
    for _ in range(EACH):
        with socket.create_connection((address.hostname, address.port), timeout=30) as one:
            try:
                one.sendall(request(draw))
                if draw.random() < 0.1:
                    continue
                one.shutdown(socket.SHUT_WR)
                found.append(b"".join(iter(lambda one=one: one.recv(2**16), b"")))
            except OSError:  # dropped while it was still sending
                continue
    return found


@pytest.mark.slow
def test_thousands_of_wrong_requests_leave_it_answering_and_it_never_shows_its_inside(caplog):
    with asking(recorded(), speaker=sorter()) as client:
        with ThreadPoolExecutor(TOGETHER) as pool:
            found = [answer for part in pool.map(asked, [client.address] * TOGETHER, range(TOGETHER)) for answer in part]
        statuses = {answer.split(b" ", 2)[1] for answer in found if answer.startswith(b"HTTP/1.1 ")}
        assert {b"200", b"400", b"403", b"404", b"405"} <= statuses
        assert not any(status.startswith(b"5") for status in statuses)
        for answer in found:
            assert b"Traceback" not in answer
            assert b".py" not in answer
            head, _, body = answer.partition(b"\r\n\r\n")
            if head[9:10] == b"4" and body:
                assert set(json.loads(body)) == {"error"}
        assert client.json("/api/start")["model"] == "sorter"
        client.idle()
    assert not [record for record in caplog.records if record.name.startswith("regard")]
