import importlib
import math
from collections import Counter

import pytest

from regard import ConfigError
from regard.evaluate import translation_scores
from regard.evaluate.translation_scores import bleu, chrf, translate_sentences
from regard.generate.translation_search import translate
from regard.models.recurrent import RecurrentTranslator
from regard.text import BytePair

TEXT = BytePair.train(["the cat sat on the mat, and the dog saw the cat"] * 5, 280)
FOUND = ["the cat sat on the mat", "the dog saw the cat again today", "a mat"]
WANTED = ["the cat sat on a mat", "the dog saw the cat again and again", "the mat is here"]


def compute_bleu(found, wanted):
    """The paper's equations, for sentences of which every length of run has a match somewhere."""
    logs = []
    for n in range(1, 5):
        right = whole = 0
        for one, other in zip(found, wanted, strict=True):
            runs = [Counter(zip(*(words.split()[k:] for k in range(n)), strict=False)) for words in (one, other)]
            right += sum((runs[0] & runs[1]).values())
            whole += sum(runs[0].values())
        logs.append(math.log(right / whole))
    lengths = [sum(len(one.split()) for one in text) for text in (found, wanted)]
    return 100 * math.exp(min(0, 1 - lengths[1] / lengths[0]) + sum(logs) / 4)


def test_bleu_is_that_of_the_paper():
    assert bleu(FOUND, WANTED).score == pytest.approx(compute_bleu(FOUND, WANTED), rel=1e-9)


@pytest.mark.parametrize("score", [bleu, chrf])
def test_the_reference_itself_scores_100_and_something_else_less_and_both_are_signed(score):
    assert score(WANTED, WANTED).score == pytest.approx(100)
    found = score(FOUND, WANTED)
    assert 0 < found.score < 90
    assert "version:" in found.signature
    assert str(found) == f"{found.name} {found.score:.1f}  {found.signature}"


def test_an_interval_is_wider_for_fewer_sentences_and_its_signature_says_it_was_drawn():
    few, many = (bleu(FOUND * times, WANTED * times, draws=100) for times in (1, 30))
    assert few.score == pytest.approx(many.score)
    assert few.interval > 2 * many.interval > 0
    assert "bs:100" in few.signature
    assert bleu(FOUND, WANTED).interval is None


@pytest.mark.parametrize("draws", [1, -3, 2.5])
def test_draws_from_which_no_interval_follows_are_refused(draws):
    with pytest.raises(ConfigError, match="draws must be"):
        bleu(FOUND, WANTED, draws=draws)


@pytest.mark.parametrize(("count", "found", "interval"), [(bleu, ["x"] * 3, 0.0), (chrf, ["x", "x", "x the"], None)])
def test_translations_with_hardly_a_right_word_are_scored_too(count, found, interval):
    score = count(found, WANTED, draws=50)
    assert (score.score, score.interval) == (count(found, WANTED).score, interval)


def test_where_sacrebleu_is_missing_it_is_said(monkeypatch):
    def none(name):
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", none)
    with pytest.raises(ConfigError, match="BLEU needs sacrebleu: pip install sacrebleu"):
        bleu(FOUND, WANTED)


@pytest.mark.parametrize("beams", [1, 3])
def test_translations_come_in_order_and_nothing_comes_of_nothing(monkeypatch, beams):
    monkeypatch.setattr(translation_scores, "BLOCK", 2)
    model = RecurrentTranslator("additive", vocabulary=TEXT.vocabulary, width=8, hidden=9).eval()
    model.text = TEXT
    told = []
    sentences = ["the cat", "", "the  dog\u00a0saw the cat", " ", "the mat"]
    found = list(translate_sentences(model, sentences, beams=beams, watch=told.append))
    for sentence, one in zip(sentences, found, strict=True):
        words = " ".join(sentence.split())
        if words:
            (expected,) = translate(model, [[*TEXT.encode(words), TEXT.end]], beams=beams)
            words = TEXT.decode([token for token in expected.tokens if token != TEXT.end])
        assert one == " ".join(words.split())
    assert told == [2, 4, 5]
    assert any(found)
