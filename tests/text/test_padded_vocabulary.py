"""A model may have more tokens than its text: those are written as no character."""

from regard.text import Letters
from regard.text.padded_vocabulary import PaddedVocabulary, pad_vocabulary

ABC = Letters("ABC")


def test_a_token_beyond_the_vocabulary_is_written_as_no_character():
    text = pad_vocabulary(ABC, 7)
    assert isinstance(text, PaddedVocabulary)
    assert text.encode("CAB") == ABC.encode("CAB")
    assert text.bytes([2, 3, 0, 6]).decode() == "C\ufffdA\ufffd"
    assert text.pieces([6, 1]) == ["\ufffd", "B"]
