"""Ctrl-C of the command itself, in the middle of what it writes to somebody."""

import http.client
import json
import os
import signal
import subprocess
import sys
from contextlib import closing, contextmanager
from urllib.parse import urlsplit

import pytest

from regard.compiled import threads


@contextmanager
def open_stream(tokens, **environment):
    """Open a text that `regard serve` writes, in a context: the process, and the answer whose lines come one by one."""
    command = [sys.executable, "-m", "regard", "serve", "--model", "pocket", "--port", "0"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    server = subprocess.Popen(command, text=True, env={**os.environ, **environment}, **streams)
    try:
        address = next(line.split()[-1] for line in server.stdout if "http://" in line)
        asked = {"text": "Once upon a time", "tokens": tokens, "temperature": 0.8, "seed": 1}
        with closing(http.client.HTTPConnection(urlsplit(address).netloc, timeout=300)) as client:
            client.request("POST", "/api/generate", json.dumps(asked), {"Content-Type": "application/json"})
            with client.getresponse() as answer:
                yield server, answer
        assert server.wait(60) == 0
        assert server.stderr.read() == ""
    finally:
        server.kill()
        server.communicate()


@pytest.mark.slow
def test_an_interrupt_in_the_middle_of_a_stream_ends_the_command_without_a_traceback():
    with open_stream(160) as (server, answer):
        assert "error" not in json.loads(answer.readline())
        server.send_signal(signal.SIGINT)
        with pytest.raises(http.client.IncompleteRead):  # it is cut, not finished
            answer.read()


@pytest.mark.slow
@pytest.mark.skipif(not threads.can_run_loops(), reason="torch has no OpenMP of GNU's kind, or numba is not installed")
def test_an_interrupt_while_loops_are_compiled_ends_the_command_at_once(tmp_path):
    with open_stream(5, NUMBA_CACHE_DIR=str(tmp_path)) as (server, answer):  # empty, so that all is compiled
        assert json.loads(answer.readline()) == {"compiling": True}
        server.send_signal(signal.SIGINT)
    assert not [*tmp_path.rglob("*multiply_shared*.nbc")]  # it did not wait for the loop
