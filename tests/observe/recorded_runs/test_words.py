import pytest
import torch

from regard import ConfigError, ShapeError
from regard.observe.recorded_runs import words

CPU = torch.device("cpu")


def test_equal_words_are_equal_numbers_in_every_batch_row():
    found = words.convert_to_ids([["the", "cat", "the"], ["cat", "a", "the"]], 2, 3, CPU)
    assert found[0, 0] == found[0, 2] == found[1, 2]
    assert found[0, 1] == found[1, 0]
    assert len(found.unique()) == 3


def test_the_words_of_one_batch_row_are_those_of_all():
    assert words.convert_to_ids(["a", "b"], 3, 2, CPU).tolist() == [[0, 1]] * 3
    assert words.convert_to_ids(torch.tensor([5, 7]), 2, 2, CPU).tolist() == [[5, 7]] * 2


@pytest.mark.parametrize("tokens", [["a", "b"], [["a", "b", "c"]] * 3, [["a", "b", "c"], ["a"]], torch.zeros(2, 4)])
def test_tokens_that_do_not_fit_the_keys_are_reported(tokens):
    with pytest.raises(ShapeError, match="3 keys"):
        words.convert_to_ids(tokens, 2, 3, CPU)


@pytest.mark.parametrize("token", [",", "Ġ,", "▁...", " ?!", "##.", "\n—", "。"])
def test_punctuation_is_determined_by_its_characters(token):
    assert words.is_punctuation(token)


@pytest.mark.parametrize("token", ["a", "'s", "", "Ġ", "3", "a.", "+", "\n"])
def test_what_holds_a_letter_or_nothing_is_no_punctuation(token):
    assert not words.is_punctuation(token)


def test_a_class_is_a_bool_or_a_question_about_each_word():
    chosen = {"capital": str.istitle, "given": torch.tensor([True, False, True]), "each": torch.eye(3).bool()[:2]}
    found = words.mark_classes(["A", "b", "C"], chosen, 2, 3, CPU)
    assert found.tolist() == [
        [[True, False, True], [True, False, True], [True, False, False]],
        [[True, False, True], [True, False, True], [False, True, False]],
    ]
    assert words.mark_classes(None, {}, 2, 3, CPU).shape == (2, 0, 3)


def test_a_class_that_cannot_be_determined_is_an_error():
    with pytest.raises(ShapeError, match=r"recording\.tokens"):
        words.mark_classes(None, {"capital": str.istitle}, 1, 3, CPU)
    with pytest.raises(ShapeError, match=r"\(k,\) = \(3,\)"):
        words.mark_classes(None, {"given": torch.tensor([1, 0, 1])}, 1, 3, CPU)


def test_words_of_two_texts_go_to_the_axes_that_they_are_of():
    both = words.TextPair.from_tokens({"rows": ["le", "chat"], "columns": ["the", "cat", "sat"]})
    assert list(both) == ["le", "chat"]
    assert (len(both), both[1]) == (2, "chat")
    assert words.select_axis_words(both, "cross", "decoder.0.cross") == (both.rows, both.columns)
    assert words.select_axis_words(both, "self", "model.encoder.layers.0.attn") == (both.columns, both.columns)
    assert words.select_axis_words(both, "self", "decoder.0.attention") == (both.rows, both.rows)
    behind = words.TextPair.from_tokens({"rows": ["le", "chat"], "columns": ["the", "cat", "sat"], "read": ["", "le"]})
    assert words.select_axis_words(behind, "cross", "decoder.0.cross") == (behind.rows, behind.columns)
    assert words.select_axis_words(behind, "self", "decoder.0.attention") == (["", "le"], ["", "le"])
    assert list(behind) == ["", "le"]
    one = ["a", "b"]
    assert words.select_axis_words(one, "cross", "attention") == (one, one)
    assert words.TextPair.from_tokens(one) is one
    assert words.TextPair.from_tokens(None) is None


@pytest.mark.parametrize("given", [{"rows": ["a"]}, {"rows": ["a"], "columns": ["b"], "depth": ["c"]}, {}])
def test_words_of_other_axes_are_refused(given):
    with pytest.raises(ConfigError, match='"rows"'):
        words.TextPair.from_tokens(given)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("The cat sat . The dog ran !", [0, 0, 0, 0, 1, 1, 1, 1]),
        ('"Stop." he said. No', [0, 1, 1, 2]),
        ("one two three", [0, 0, 0]),
        ("What ? ? ! Nothing .", [0, 0, 0, 0, 1, 1]),
        (". . begins", [0, 0, 1]),
    ],
)
def test_sentences_are_numbered_by_what_ends_them(text, numbers):
    assert words.number_sentences([f" {word}" for word in text.split()]) == numbers
