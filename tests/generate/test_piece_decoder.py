import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.generate.piece_decoder import PieceDecoder

LETTERS = st.text(alphabet="ab€é🙂", max_size=12)


@st.composite
def cut(draw, texts=LETTERS):
    """A text, and its bytes cut anywhere."""
    text = draw(texts)
    data = text.encode()
    borders = sorted(draw(st.lists(st.integers(0, len(data)), max_size=9)))
    return text, [data[i:j] for i, j in zip([0, *borders], [*borders, len(data)], strict=True)]


@given(cut())
def test_the_pieces_of_a_text_are_the_text_wherever_it_is_cut(found):
    text, parts = found
    pieces = PieceDecoder()
    shown = [pieces.add(part) for part in parts]
    assert "".join(shown) == text  # and so no character waits for more than its last byte
    assert pieces.add(b"", last=True) == ""


@given(cut(), st.lists(st.text(alphabet="ab€", min_size=1, max_size=4), min_size=1, max_size=3))
def test_a_stop_string_ends_the_text_before_it_wherever_it_is_cut(found, stops):
    text, parts = found
    ends = [(text.index(stop) + len(stop), text.index(stop)) for stop in stops if stop in text]
    pieces = PieceDecoder(stops)
    shown = "".join([*(pieces.add(part) for part in parts), pieces.add(b"", last=True)])
    assert shown == (text[: min(ends)[1]] if ends else text)
    assert pieces.has_stopped == bool(ends)


def test_nothing_is_held_back_that_cannot_begin_a_stop_string():
    pieces = PieceDecoder(["END"])
    assert [pieces.add(part) for part in (b"the E", b"N", b"D of E")] == ["the ", "", ""]
    pieces = PieceDecoder(["END"])
    assert [pieces.add(part) for part in (b"the E", b"N", b"N", b"E")] == ["the ", "", "ENN", ""]
    assert pieces.add(b"", last=True) == "E"


def test_a_stop_string_that_begins_again_within_itself_is_held_back_whole():
    pieces = PieceDecoder(["aab"])
    assert [pieces.add(part) for part in (b"caa", b"a", b"b")] == ["c", "a", ""]
    assert pieces.has_stopped


@pytest.mark.parametrize("parts", [[b"abcd"], [b"ab", b"cd"], [b"a", b"b", b"c", b"d"]])
def test_of_two_stop_strings_the_one_complete_first_counts(parts):
    pieces = PieceDecoder(["abcd", "bc"])
    assert "".join(map(pieces.add, parts)) == "a"


def test_half_a_character_waits_and_is_written_at_the_end():
    pieces = PieceDecoder()
    assert [pieces.add(bytes([byte])) for byte in "é€".encode()] == ["", "é", "", "", "€"]
    assert pieces.add("€".encode()[:2]) == ""
    assert pieces.add(b"", last=True) == "\ufffd"


def test_bytes_that_are_no_text_do_not_stop_what_follows():
    assert PieceDecoder().add(b"a\xffb", last=True) == "a\ufffdb"
