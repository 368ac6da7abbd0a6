import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regard import DataError
from regard.text import Letters


@given(
    st.sets(st.characters(codec="utf-8", exclude_characters="\n\r"), min_size=1)
    .map("".join)
    .flatmap(lambda a: st.tuples(st.just(a), st.text(a)))
)
def test_a_text_comes_back(pair):
    alphabet, text = pair
    letters = Letters(alphabet)
    ids = letters.encode(text)
    assert all(0 <= one < letters.vocabulary for one in ids)
    assert letters.decode(torch.tensor(ids, dtype=torch.int64)) == "".join(letters.pieces(ids)) == text
    assert letters.bytes(ids) == text.encode()


def test_an_alphabet_is_saved_and_read_back(tmp_path):
    Letters("AÉ ").save(tmp_path / "new")
    assert Letters.load(tmp_path / "new").alphabet == "AÉ "


@pytest.mark.parametrize(
    "ask", [lambda one: one.encode("ABD"), lambda one: one.encode("A", allowed=["X"]), lambda one: one.decode([3])]
)
def test_what_is_not_in_the_alphabet_is_refused(ask):
    with pytest.raises(DataError, match=r"no (letter|token)"):
        ask(Letters("ABC"))


@pytest.mark.parametrize("alphabet", ["", "ABA"])
def test_an_alphabet_has_each_letter_once(alphabet):
    with pytest.raises(DataError, match="each of them once"):
        Letters(alphabet)
