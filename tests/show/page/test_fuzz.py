"""The server under thousands of requests that are none, or ask for what is not there: it goes on answering."""

import http.client
import json
import logging
import random
import socket
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from show.page.server_client import join_server_threads, make_sorter, open_client, record_sorter

PATHS = [
    "/",
    "/static/main.js",
    "/api/start",
    "/api/recordings",
    "/api/example",
    "/api/type",
    "/api/generate",
    "/api/stop",
    "/api/translation",
    "/api/gallery",
]
PATHS += [
    f"/api/r/r1/{name}"
    for name in (
        "words",
        "heads",
        "thumbs",
        "open",
        "tile",
        "cell",
        "row",
        "column",
        "top",
        "steps",
        "examination",
        "influence",
        "finding",
        "story",
        "settings",
        "target",
        "attribution",
        "attribution_thumbs",
        "",
    )
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
    "show",
    "at",
    "token",
    "what",
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
    "pull",
    "carried",
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
    posted = path in TO and draw.random() < 0.8
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


def send_at_random(address, seed: int) -> list[bytes]:
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
    with open_client(record_sorter(), adapter=make_sorter()) as client:
        with ThreadPoolExecutor(TOGETHER) as pool:
            found = [
                answer for part in pool.map(send_at_random, [client.address] * TOGETHER, range(TOGETHER)) for answer in part
            ]
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


# requests that are well formed, with anything in them

WORDS = st.one_of(st.sampled_from(VALUES), st.text(max_size=30), st.integers().map(str), st.floats().map(str))
HUGE = st.sampled_from([10**30, -(10**30), 2**63, 10**4000, 1e308, -0.0])
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20), HUGE)
SURROGATES = st.text(st.characters(categories=["Cs", "Cc", "Lu", "So"]), max_size=20)
ANY = st.recursive(
    st.one_of(SCALARS, SURROGATES),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
TEXTS = st.one_of(st.text("ABC", max_size=40), st.text(max_size=40), SURROGATES, st.just("A" * 21_000), st.just(""))
ASKED = st.fixed_dictionaries(
    {},
    optional={
        "text": TEXTS | ANY,
        "tokens": st.integers(-1, 30) | ANY,
        "run": st.sampled_from(["r1", ""]) | ANY,
        "temperature": st.sampled_from([0, 0.5, 1, 2]) | ANY,
        "seed": st.integers(0, 100) | ANY,
        "sees": st.sampled_from(["all", "earlier"]) | ANY,
    },
)
RAW = ["[" * 100_000, '{"text":' * 5000, '{"text":"A","text":1}', "1" * 5000, '{"tokens":1e999}', "\ufeff{}", "NaN", ""]
ENCODINGS = ["utf-8", "utf-16", "utf-32", "latin-1"]
SAID = st.one_of(ASKED, ASKED, ANY).map(lambda found: json.dumps(found)) | st.sampled_from(RAW)
SENT = st.builds(lambda text, encoding: text.encode(encoding, "replace"), SAID, st.sampled_from(["utf-8"] * 5 + ENCODINGS))
TYPES = st.sampled_from(["application/json"] * 6 + ["application/json; charset=utf-16", "text/plain", "", "application/JSON "])
NAMED = st.sampled_from(["accept-encoding", "x-regard-token", "content-encoding", "range", "origin", "if-none-match", "te"])
LETTERS = st.text(st.characters(min_codepoint=32, max_codepoint=255, exclude_characters="\x7f"), max_size=40)
FIELDS = st.dictionaries(NAMED, st.sampled_from(["gzip", "deflate", "bytes=0-", "null", "*"]) | LETTERS, max_size=2)
QUERIES = st.lists(st.tuples(st.sampled_from(NAMES) | st.text(max_size=5), WORDS), max_size=5)
TO = ["/api/type", "/api/generate", "/api/stop", "/api/translation", "/api/r/r1/examination"]
SEGMENTS = st.lists(st.sampled_from(["api", "r", "r1", "static", "..", ".", "", "heads"]) | st.text(max_size=8), max_size=5)
WHERE = st.sampled_from(PATHS) | SEGMENTS.map(lambda parts: "/" + "/".join(quote(part, errors="replace") for part in parts))
GETS = st.tuples(st.just("GET"), WHERE, QUERIES, st.just(b""), TYPES, FIELDS)
POSTS = st.tuples(st.just("POST"), st.sampled_from(TO) | WHERE, QUERIES, SENT, TYPES, FIELDS)
EXAMPLES, AT_ONCE, TIMEOUT_SECONDS = 400, 8, 60


def send_request(address, one):
    """The status and the body of the answer to one request."""
    method, path, query, body, kind, fields = one
    asked_for = "&".join(f"{quote(name, errors='replace')}={quote(value, errors='replace')}" for name, value in query)
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=TIMEOUT_SECONDS)
    try:
        headers = {"content-type": kind, **{name: value.strip() for name, value in fields.items()}}
        connection.request(method, f"{path}?{asked_for}", body or None, headers)
        answer = connection.getresponse()
        return answer.status, answer.getheader("content-encoding"), answer.read()
    finally:
        connection.close()


@contextmanager
def logging_to(records):
    """A context in which every record of any logger is appended to a list."""
    handler = logging.Handler(logging.WARNING)
    handler.emit = records.append
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)


def check(one, status, packed, body):
    """What every answer is: what was asked for, or a refusal in one sentence; never an error of the server's own."""
    assert status == 200 or 400 <= status < 500, (one, status, body)
    assert b"Traceback" not in body, one
    assert b"error occurred inside" not in body, one  # a stream has begun with 200 when its work fails
    if status >= 400 and packed is None and body:
        (sentence,) = json.loads(body).values()
        assert len(sentence) <= 500, one
        assert not any(ord(letter) < 32 for letter in sentence), one


@pytest.mark.slow
def test_any_query_any_json_and_several_at_once_are_answered_or_refused_in_a_sentence(capfd):
    counts, records = Counter(), []

    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        phases=[Phase.explicit, Phase.generate],  # to shrink a race is to lose it
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(requests=st.lists(GETS | POSTS, min_size=1, max_size=AT_ONCE))
    def send(requests):
        with ThreadPoolExecutor(AT_ONCE) as pool:
            answers = list(pool.map(lambda one: send_request(client.address, one), requests))
        for one, answer in zip(requests, answers, strict=True):
            check(one, *answer)
            counts[answer[0]] += 1

    with join_server_threads(), logging_to(records), open_client(record_sorter(), adapter=make_sorter()) as client:
        send()
        assert client.json("/api/start")["model"] == "sorter"
        client.idle()
    assert counts[200] > EXAMPLES / 4
    assert counts.total() > 2 * EXAMPLES
    assert not records
    assert capfd.readouterr().err == ""
    print(f"answers by status: {dict(sorted(counts.items()))}")
