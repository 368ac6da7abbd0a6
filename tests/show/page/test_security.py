import json

import pytest

from regard.show.page.security import is_loopback, parse_host
from regard.show.page.server import make_server
from show.page.server_client import open_client, record_sorter


@pytest.fixture(scope="module")
def client():
    with open_client(record_sorter()) as found:
        yield found


@pytest.fixture(scope="module")
def outside():
    """A client of a page that is bound to every address of this machine."""
    with open_client(record_sorter(), host="0.0.0.0") as found:
        found.address = found.address._replace(netloc=f"127.0.0.1:{found.address.port}")
        yield found


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:9999", "[::1]:80", "LOCALHOST:1", "127.1.2.3"])
def test_names_of_this_machine_are_answered(client, host):
    assert client.ask("/api/start", host=host)[0] == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "", "a b", "8.8.8.8", "localhost@evil", "[::1"]
)
@pytest.mark.parametrize("path", ["/", "/api/start", "/static/main.js"])
def test_other_names_are_refused_for_a_page_may_point_its_own_name_here(client, host, path):
    status, _, body = client.ask(path, host=host)
    assert (status, "error" in json.loads(body)) == (403, True)


def test_a_request_of_another_page_is_refused(client):
    own = f"http://127.0.0.1:{client.address.port}"
    assert client.ask("/api/start", origin=own)[0] == 200
    for origin in ("http://evil.example", "null", f"https://127.0.0.1:{client.address.port}", "http://127.0.0.1:1", ""):
        assert client.ask("/api/start", origin=origin)[0] == 403
    assert client.ask("/api/start", sec_fetch_site="cross-site")[0] == 403
    assert client.ask("/", sec_fetch_site="cross-site")[0] == 200  # a link to it may stand anywhere


@pytest.mark.parametrize("path", ["/", "/api/start", "/static/main.js", "/nowhere", "/api/r/r1/tile"])
def test_every_answer_has_a_strict_policy(client, path):
    headers = client.ask(path)[1]
    policy = headers["content-security-policy"]
    assert policy == (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    assert headers["x-frame-options"] == "DENY"
    assert headers["cross-origin-opener-policy"] == "same-origin"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert not [name for name in headers if name.startswith("access-control")]
    assert "server" not in headers


def test_what_is_no_request_has_the_policy_too(client):
    with client.connect() as one:
        one.sendall(b"\x16\x03\x01\x02\0\r\n\r\n")
        answer = b"".join(iter(lambda: one.recv(2**16), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"content-security-policy: default-src 'none'" in head
    assert b"nosniff" in head
    assert "error" in json.loads(body)


@pytest.mark.parametrize("hosts", [b"", b"Host: localhost\r\nHost: localhost\r\n", b"Host: localhost\r\nHost: evil\r\n"])
def test_no_name_and_two_names_are_refused(client, hosts):
    with client.connect() as one:
        one.sendall(b"GET /api/start HTTP/1.0\r\nConnection: close\r\n" + hosts + b"\r\n")
        assert one.recv(2**16).split()[1] in (b"400", b"403")


def test_another_page_cannot_ask_whether_it_may(client):
    status, headers, _ = client.ask("/api/type", "OPTIONS", origin="http://evil.example", access_control_request_method="POST")
    assert status == 403
    assert not [name for name in headers if name.startswith("access-control")]


def test_beyond_this_machine_nothing_is_answered_without_the_token(outside):
    token = outside.server.token
    assert len(token) >= 16
    assert outside.server.address.endswith(f"/?token={token}")
    for path in (
        "/",
        "/?token=",
        f"/?token={token[:-1]}",
        f"/?token={token}x",
        "/api/start",
        f"/api/start?token={token}",
        "/nowhere",
    ):
        assert outside.ask(path)[0] == 403
    assert outside.ask("/api/start", x_regard_token=token[:-1])[0] == 403
    assert outside.ask("/api/start", x_regard_token="é")[0] == 403
    assert outside.ask(f"/?token={token}")[0] == 200
    assert outside.ask("/api/start", x_regard_token=token)[0] == 200
    assert outside.ask("/static/main.js")[0] == 200  # which says nothing of anybody's texts


def test_two_pages_have_two_tokens():
    one, other = (make_server(record_sorter(), host="0.0.0.0") for _ in range(2))
    assert one.token != other.token
    one.stop()
    other.stop()


@pytest.mark.parametrize(
    ("host", "own"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("", False),
        ("192.168.1.2", False),
        ("x.localhost.evil", False),
    ],
)
def test_the_addresses_of_this_machine_alone_are_loopback(host, own):
    assert is_loopback(host) is own


@pytest.mark.parametrize(
    ("header", "name"),
    [
        ("localhost:80", "localhost"),
        ("[::1]:80", "::1"),
        ("a.b", "a.b"),
        ("a b", None),
        ("a:b", None),
        ("", None),
        ("a/b", None),
    ],
)
def test_the_name_in_a_host_header(header, name):
    assert parse_host(header) == name
