from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.text.pairs.sources import SentencePair
from regard.text.pairs.split import choose_part, normalize_sentence, split_pairs


def parts(pairs, valid=0.1, test=0.2):
    return [part for part, _ in split_pairs(pairs, valid, test)]


@given(st.lists(st.tuples(st.sampled_from(["Go.", "go", "GO !", "Stop.", "stop", "ﬁne", "Fine"]), st.text()), max_size=30))
def test_no_source_sentence_is_in_two_parts_however_it_is_written(sides):
    pairs = [SentencePair(*one) for one in sides]
    found = {(normalize_sentence(one.source), part) for part, one in split_pairs(pairs, 0.3, 0.3)}
    assert len(found) == len({sentence for sentence, _ in found})


def test_a_sentence_that_a_file_gives_to_a_part_goes_there_from_other_files_too():
    pairs = [
        SentencePair("A dog runs.", "x", "test"),
        SentencePair("Two men.", "y", "train"),
        SentencePair("Two cats.", "z", "valid"),
    ]
    others = [SentencePair("a dog runs", "1"), SentencePair("two men!", "2"), SentencePair("TWO CATS", "3")]
    for share in (0.0, 0.9):
        assert parts([*pairs, *others], valid=0.0, test=share) == ["test", "train", "valid"] * 2


def test_the_hardest_part_has_what_several_are_given():
    pairs = [SentencePair("A dog.", "x", part) for part in ("test", "train", "valid")]
    assert parts([*pairs, SentencePair("a dog", "y")]) == ["test", "train", "valid", "test"]


def test_the_shares_are_about_the_requested_ones():
    found = Counter(choose_part(f"sentence {n}", 0.1, 0.2) for n in range(10_000))
    assert found["test"] == pytest.approx(2000, abs=150)
    assert found["valid"] == pytest.approx(1000, abs=120)


def test_the_part_of_a_sentence_depends_on_nothing_but_itself_and_is_that_of_every_version():
    known = {"go": "test", "stop": "train", "run": "train", "on": "valid", "good": "test", "a": "valid"}
    assert {sentence: choose_part(sentence, 0.25, 0.25) for sentence in known} == known


def test_without_a_word_a_sentence_is_itself():
    assert normalize_sentence("?!") == "?!" != normalize_sentence("!")
