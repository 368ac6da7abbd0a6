"""A terminal is told once that loops are compiled; a pipe, and whoever uses the library, is told nothing."""

import io
import logging
import sys

import pytest

from regard.cli.compilation import LOGGER, print_compilation


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "lines"), [(Terminal(), ["regard look: compiling"]), (io.StringIO(), [])])
def test_a_terminal_gets_the_note_once_and_a_pipe_does_not(monkeypatch, stream, lines):
    before = LOGGER.level, list(LOGGER.handlers)
    monkeypatch.setattr(sys, "stderr", stream)
    with print_compilation("look"):
        for _ in range(3):
            LOGGER.info("compiling")
    LOGGER.info("compiling")
    assert stream.getvalue().splitlines() == lines
    assert (LOGGER.level, LOGGER.handlers) == before


def test_the_loops_say_so_where_they_are_not_on_disk_yet(tmp_path, monkeypatch, caplog):
    numba = pytest.importorskip("numba", reason="numba is not installed: pip install 'regard[fast]'")
    from regard.compiled.jit_cache import callback_with_cache
    from regard.compiled.threads import Arguments

    def make():
        @callback_with_cache(Arguments)
        def work(place):
            pass

        return work

    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    with caplog.at_level(logging.INFO, logger=LOGGER.name):
        assert make().address
        assert [record.message for record in caplog.records] == [
            "compiling loops for this processor, once: this takes a few seconds"
        ]
        assert make().address  # from the disk
        assert len(caplog.records) == 1
