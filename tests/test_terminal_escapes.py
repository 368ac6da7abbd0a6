import io
import sys
import unicodedata

import pytest

from regard.terminal_escapes import LINES, EscapingStream, ReaderGoneError, escape_controls


@pytest.mark.slow
def test_exactly_what_steers_a_terminal_or_has_no_encoding_is_escaped():
    directions = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
    for character in map(chr, range(sys.maxunicode + 1)):
        steers = (
            unicodedata.category(character) in {"Cc", "Cs", "Zl", "Zp"} or unicodedata.bidirectional(character) in directions
        )
        shown = escape_controls(character)
        assert shown == (character.encode("unicode_escape").decode() if steers else character)
        assert shown.encode()
        assert escape_controls(character, LINES) == (character if character in LINES else shown)


def test_what_was_escaped_is_escaped_once():
    once = escape_controls("a\x1b]52;c;aGk=\x07\udcff\\x1b")
    assert once == "a\\x1b]52;c;aGk=\\x07\\udcff\\x1b"
    assert escape_controls(once) == once


def test_a_stream_escapes_all_that_is_written_and_is_otherwise_the_stream_behind_it():
    behind = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="replace", newline="")
    stream = EscapingStream(behind)
    print("a\x1b\r\n\tb", "\udcff", "é", file=stream)
    stream.writelines(["\x07", "\x9b"])
    stream.flush()
    assert behind.buffer.getvalue() == b"a\\x1b\\r\n\tb \\udcff ?\n\\x07\\x9b"
    assert (stream.encoding, stream.isatty(), stream.unescaped) == ("ascii", False, behind)


def test_a_reader_that_is_gone_is_distinguished_from_any_other_broken_pipe():
    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

        def flush(self):
            raise BrokenPipeError

    for fail in (lambda stream: stream.write("a"), EscapingStream.flush):
        with pytest.raises(ReaderGoneError):
            fail(EscapingStream(Gone()))
