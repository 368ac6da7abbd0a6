"""A bar is drawn on a terminal after a delay, and what is redirected under it stays redirected."""

import contextlib
import io
import sys
import time

from regard.cli import progress_bar
from regard.cli.progress_bar import show_bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def open_terminal(monkeypatch):
    """A terminal as stderr, on which bars are drawn soon; not a fixture, because pytest sets stderr after these."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress_bar, "DELAY_SECONDS", 0.2)
    monkeypatch.setattr(progress_bar, "EVERY_SECONDS", 0.01)
    monkeypatch.setenv("TERM", "xterm")
    return stream


def wait_for(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_stream_that_is_redirected_before_the_bar_is_drawn_stays_redirected(monkeypatch):
    terminal = open_terminal(monkeypatch)
    hidden = io.StringIO()
    with show_bar("loading", lambda: 1, 3), contextlib.redirect_stderr(hidden):
        wait_for(lambda: "loading" in terminal.getvalue())
        print("another bar", file=sys.stderr)
    assert hidden.getvalue() == "another bar\n"
    assert "another bar" not in terminal.getvalue()
    assert sys.stderr is terminal


def test_a_pipe_gets_no_bar(monkeypatch):
    pipe = io.StringIO()
    monkeypatch.setattr(sys, "stderr", pipe)
    monkeypatch.setattr(progress_bar, "DELAY_SECONDS", 0.0)
    with show_bar("loading", lambda: 1, 3):
        time.sleep(0.1)
    assert pipe.getvalue() == ""
