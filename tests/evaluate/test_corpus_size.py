import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.evaluate import corpus_size as module
from regard.evaluate.corpus_size import count_words_and_bytes
from regard.text import BytePair, Letters
from regard.text.corpus import prepare

WORDS = BytePair.train(["the cat sat on the mat"] * 5, 270)
TEXT = st.text(st.sampled_from("ab é\n\u2003🦊<|endoftext|>")).filter(str.strip)


@settings(max_examples=40)
@given(st.lists(TEXT, min_size=1), st.integers(1, 9))
def test_words_and_bytes_of_a_corpus_are_those_of_its_documents(tmp_path_factory, texts, block):
    made = prepare(texts, WORDS, tmp_path_factory.mktemp("made") / "corpus")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK", block)
        words, size = count_words_and_bytes(made)
    assert words == sum(len(text.split()) for text in texts)
    assert size == sum(len(text.encode()) for text in texts)


def test_letters_have_no_end_and_their_documents_run_together(tmp_path):
    made = prepare(["ab c", "d e"], Letters("abcde "), tmp_path / "corpus")
    assert count_words_and_bytes(made) == (3, 7)
