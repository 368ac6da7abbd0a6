import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regard import DataError
from regard.text import Letters

ALPHABETS = st.sets(st.characters(codec="utf-8"), min_size=1).map("".join)


@given(ALPHABETS.flatmap(lambda a: st.tuples(st.just(a), st.text(a))))
def test_a_text_comes_back(pair):
    alphabet, text = pair
    letters = Letters(alphabet)
    ids = letters.encode(text)
    assert all(0 <= one < letters.vocabulary for one in ids)
    assert letters.decode(torch.tensor(ids, dtype=torch.int64)) == "".join(letters.pieces(ids)) == text
    assert letters.bytes(ids) == text.encode()


@given(ALPHABETS)
def test_any_alphabet_is_saved_and_read_back(tmp_path_factory, alphabet):
    folder = tmp_path_factory.mktemp("letters")
    Letters(alphabet).save(folder / "new")
    assert Letters.load(folder / "new").alphabet == alphabet


@pytest.mark.parametrize("alphabet", ["AÉ ", "AB\n", "\n", "\r", "A\r", "A\n\r", "A\r\n", "\n\u2028", " "])
def test_letters_that_end_lines_are_saved_and_read_back(tmp_path, alphabet):
    Letters(alphabet).save(tmp_path)
    assert Letters.load(tmp_path).alphabet == alphabet


@pytest.mark.parametrize(("data", "alphabet"), [(b"ABC\n", "ABC"), (b"ABC", "ABC"), (b"ABC\r\n", "ABC"), (b"A\n\n", "A\n")])
def test_files_as_they_were_written_before_and_elsewhere_are_read(tmp_path, data, alphabet):
    (tmp_path / "letters.txt").write_bytes(data)
    assert Letters.load(tmp_path).alphabet == alphabet


@given(st.lists(st.text(), min_size=1).filter(any))
def test_the_letters_of_texts_are_each_that_occurs(texts):
    letters = Letters.from_texts(iter(texts))
    assert letters.alphabet == "".join(sorted(set("".join(texts)))) == Letters.from_texts("".join(texts)).alphabet
    assert [letters.decode(letters.encode(text)) for text in texts] == texts


def test_the_end_of_a_files_line_is_no_letter_unless_the_alphabet_has_it():
    assert Letters("ABC").encode("CAB\n") == Letters("ABC").encode("CAB\r\n") == [2, 0, 1]
    assert Letters("ABC\n").encode("CAB\n") == [2, 0, 1, 3]
    assert Letters("A\r").encode("A\r\n") == [0, 1]
    for text in ("CAB\n\n", "CA\nB"):
        with pytest.raises(DataError, match=r"'\\n' is not a letter of this model, which reads only A, B, C"):
            Letters("ABC").encode(text)


@pytest.mark.parametrize(
    "ask", [lambda one: one.encode("ABD"), lambda one: one.encode("A", allowed=["X"]), lambda one: one.decode([3])]
)
def test_what_is_not_in_the_alphabet_is_refused(ask):
    with pytest.raises(DataError, match=r"not a (letter|token)"):
        ask(Letters("ABC"))


@pytest.mark.parametrize("alphabet", ["", "ABA"])
def test_an_alphabet_has_each_letter_once(alphabet):
    with pytest.raises(DataError, match="each given once"):
        Letters(alphabet)


@pytest.mark.parametrize(
    ("data", "says"), [(b"\xff", "not UTF-8 text"), (None, "cannot be read"), (b"AA\n", "each given once")]
)
def test_a_file_that_is_no_alphabet_is_named(tmp_path, data, says):
    if data is not None:
        (tmp_path / "letters.txt").write_bytes(data)
    with pytest.raises(DataError, match=says):
        Letters.load(tmp_path)
