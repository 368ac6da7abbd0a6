import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard import DataError
from regard.text.number_tokenizer import NumberTokenizer

IDS = st.lists(st.integers(0, 50_256))


@given(IDS)
def test_the_numbers_of_a_text_come_back(ids):
    text = NumberTokenizer().bytes(ids).decode()
    assert NumberTokenizer().encode(text) == ids


@pytest.mark.parametrize("text", ["three", "3 1 two", "3,1", "3.5", "0x3"])
def test_what_is_no_number_is_refused_with_what_to_write(text):
    with pytest.raises(DataError, match="write the text as token numbers, for example '3 1 2'"):
        NumberTokenizer().encode(text)
