import gzip
import json
import re
import signal
import socket
import subprocess
import sys
import threading

import pytest

from regard import ConfigError
from regard.show.page import server as module
from regard.show.page.server import Server, make_server
from regard.show.page.session import Session
from show.page.server_client import TEXT, Client, open_client, record_sorter


def test_the_page_and_its_files_are_served(client):
    for path, kind in (("/", "text/html"), ("/static/main.js", "text/javascript"), ("/static/style.css", "text/css")):
        status, headers, body = client.ask(path)
        assert (status, headers["content-type"].split(";")[0]) == (200, kind)
        assert body


@pytest.mark.parametrize(
    "path", ["/static/", "/static/../server.py", "/static/%2e%2e/server.py", "/static//etc/passwd", "/favicon.ico"]
)
def test_nothing_else_is(client, path):
    assert client.expect_refusal(path)[0] == 404


def test_answers_are_packed_for_those_who_unpack_them(client):
    _, headers, body = client.ask("/api/start", accept_encoding="gzip")
    assert headers["content-encoding"] == "gzip"
    assert json.loads(gzip.decompress(body))["recordings"]
    assert "content-encoding" not in client.ask("/api/start")[1]


@pytest.mark.slow
def test_it_ends_cleanly_at_a_signal():
    for one in (signal.SIGINT, signal.SIGTERM):
        command = [sys.executable, "-m", "regard", "serve", "--model", "sorter", "--text", TEXT]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            try:
                address = process.stdout.readline().strip()
                assert address.startswith("http://127.0.0.1:")
                with socket.create_connection(("127.0.0.1", int(address.rstrip("/").rpartition(":")[2]))):
                    process.send_signal(one)
                    _, said = process.communicate(timeout=300)
            finally:
                process.kill()
        assert (process.returncode, said) == (0, "")


def test_what_is_loaded_beside_a_server_is_waited_for_where_the_process_ends(recording, monkeypatch):
    waits, before = threading.Event(), threading.enumerate()  # one of another server may still load
    monkeypatch.setattr(module, "preload_modules", waits.wait)
    try:
        with make_server(recording):
            begun = [one for one in threading.enumerate() if one not in before]
            assert [one.daemon for one in begun if one.name == "regard-warm"] == [False]
    finally:
        waits.set()


OPENING = """
import sys, regard
from regard.show.page.server import make_server, preload_modules
server = make_server(regard.GPT2.load("pocket"))
preload_modules()
server.prepare_opening()
print(len(server.page.session._entries), {"sympy", "torch._dynamo", "triton"} & set(sys.modules))
"""


@pytest.mark.slow
def test_what_a_page_opens_on_needs_no_compiler_of_torch():
    found = subprocess.run([sys.executable, "-c", OPENING], capture_output=True, text=True, check=True)
    assert found.stdout == "1 set()\n"  # together they would take 140 MB


def test_an_address_that_is_taken_is_said(recording):
    with open_client(recording) as client, pytest.raises(ConfigError, match="is in use by another program"):
        make_server(recording, port=client.address.port)
    with pytest.raises(ConfigError, match="cannot be used"):
        make_server(recording, host="256.0.0.1")


@pytest.mark.parametrize("subject", [None, 7, "sorter"])
def test_a_page_needs_a_recording_or_a_model(subject):
    with pytest.raises(ConfigError):
        make_server(subject)


@pytest.mark.slow
def test_it_listens_at_this_machines_own_address_unless_told_otherwise(recording):
    for found in (make_server(recording), Server(Session(recording))):
        with found as one:
            assert one._socket.getsockname()[0] == "127.0.0.1"
            assert one.token is None


def test_a_localhost_that_is_elsewhere_needs_the_token(recording, monkeypatch):
    find = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *given, **more: find("0.0.0.0", *given, **more))
    with make_server(recording, host="localhost") as one:
        assert one.token in one.address


def test_an_address_of_ipv6_is_answered():
    try:
        found = make_server(record_sorter(), host="::1")
    except ConfigError:
        pytest.skip("this machine has no IPv6")
    with found as one:
        assert one.address.startswith("http://[::1]:")
        assert Client(one).json("/api/start")["recordings"]


def test_the_page_has_no_script_and_no_style_of_its_own_in_it(client):
    text = client.ask("/")[2].decode()
    assert re.findall(r"<script[^>]*>", text) == ['<script type="module" src="static/main.js">']
    assert not re.findall(r"<style|\sstyle=|\son[a-z]+=|javascript:", text)
    assert not re.findall(r'(?:src|href)="(?!static/|data:,")', text)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE", "PATCH", "get", "X" * 300])
@pytest.mark.parametrize("path", ["/", "/static/main.js", "/api/start", "/api/r/r1/tile"])
def test_other_methods_are_refused_with_those_there_are(client, method, path):
    status, headers, body = client.ask(path, method)
    assert status == 405
    assert "GET" in headers["allow"]
    assert "is not allowed" in json.loads(body)["error"]


def test_an_error_of_ours_before_an_answer_is_one_sentence(recording, monkeypatch, caplog):
    monkeypatch.setattr("regard.show.page.routes.get_entry", lambda *_: 1 // 0)
    with open_client(recording) as client:
        status, sentence = client.expect_refusal("/api/r/r1/open")
    assert (status, "ZeroDivision" in sentence) == (500, False)
    assert "ZeroDivisionError" in caplog.text
