import copy
import itertools

import pytest
import torch

from bounds import EXPONENTIAL, assert_within, estimate_rounding, is_stable_under_rounding, sum_bound
from models.translators import END, MADE, VOCABULARY, Weights, make_translator, pad_sentences, sentences
from regard import ConfigError, DataError
from regard.generate.translation_search import translate
from regard.models.translator import Translator

KINDS = list(MADE)
LOUD = {"plain": 4.0, "additive": 4.0}


def spoken(kind: str, seed: int = 0, dtype: torch.dtype = torch.float64, **other) -> Translator:
    return make_translator(kind, seed, dtype, LOUD.get(kind, 2.0), **other)


def log_probability(model, source, tokens) -> float:
    """That of a translation, read all at once."""
    with torch.no_grad():
        logits = model(*pad_sentences([source]), torch.tensor([[END, *tokens[:-1]]]))[0]
    return float(logits.log_softmax(-1)[range(len(tokens)), tokens].sum())


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_takes_the_likeliest_word_after_the_words_before(kind):
    model, sources = spoken(kind), sentences(7, 2, 5)
    for source, found in zip(sources, translate(model, sources, end=END, longest=9), strict=True):
        tokens = []
        while len(tokens) < 9 and tokens[-1:] != [END]:
            with torch.no_grad():
                tokens.append(int(model(*pad_sentences([source]), torch.tensor([[END, *tokens]]))[0, -1].argmax()))
        assert found.tokens == tokens


def score_bound(model, sources, terms: int, dtype: torch.dtype, **asked) -> float:
    """How far two scores of a translation may lie apart; what is translated must not hang on rounding."""
    exact = copy.deepcopy(model).double()

    def translate_sources(one):
        return translate(one, sources, end=END, **asked)

    def scores(one):
        return torch.tensor([each.score for each in translate_sources(one)], dtype=torch.float64)

    assert is_stable_under_rounding(exact, lambda one: [each.tokens for each in translate_sources(one)], terms, dtype)
    return estimate_rounding(exact, scores, terms, dtype) + sum_bound(dtype, VOCABULARY + EXPONENTIAL)  # of log Σ exp


def weight_bound(model, sources, terms: int, dtype: torch.dtype, **asked) -> float:
    """How far two attention weights of a translation may lie apart; a softmax has operations of its own, over the keys."""

    def weights(one):
        with Weights() as seen:
            translate(one, sources, end=END, **asked)
        return torch.cat([each.flatten() for each in seen.found] or [torch.zeros(1)])

    keys = 2 * max(map(len, sources)) + 10  # the longest translation
    return estimate_rounding(copy.deepcopy(model).double(), weights, terms, dtype) + sum_bound(dtype, keys + EXPONENTIAL)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize(("dtype", "loud"), [(torch.float32, 1.0), (torch.float64, 2.0)])
def test_a_translation_and_its_attention_do_not_depend_on_the_batch(kind, beams, dtype, loud):
    model, sources = make_translator(kind, 0, dtype, loud), sentences(11, 2, 5, 8, 8, 3)
    terms = VOCABULARY + EXPONENTIAL
    if dtype == torch.float32:
        most = [bound(model, sources, terms, dtype, beams=beams) for bound in (score_bound, weight_bound)]
    else:
        most = [1e-12, 1e-12]
    with Weights() as together:
        batch = translate(model, sources, end=END, beams=beams)
    places = sorted(range(len(sources)), key=lambda n: len(sources[n]))  # as they lie in the batch
    for row, source in enumerate(sources):
        with Weights() as alone:
            (found,) = translate(model, [source], end=END, beams=beams)
        assert batch[row].tokens == found.tokens
        assert abs(batch[row].score - found.score) < most[0]
        assert bool(alone.found) == (not kind.startswith("plain"))
        for ours, theirs in zip(alone.found, together.found, strict=False):  # those of the batch go on for the others
            count, keys = len(theirs) // len(sources), ours.shape[-1]
            rows = theirs[places.index(row) * count : (places.index(row) + 1) * count, :, : ours.shape[-2]]
            assert_within(rows[..., :keys], ours, most[1])
            assert not rows[..., keys:].any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length_penalty", [0.0, 1.0])
def test_the_score_is_the_log_probability_over_the_length(kind, length_penalty):
    model, sources = spoken(kind), sentences(7, 2)
    for beams in (1, 3):
        found = translate(model, sources, end=END, beams=beams, length_penalty=length_penalty)
        for source, one in zip(sources, found, strict=True):
            expected = log_probability(model, source, one.tokens) / len(one.tokens) ** length_penalty
            assert abs(one.score - expected) < 1e-9


@pytest.mark.parametrize("kind", ["plain", "additive", "transformer"])
def test_as_many_beams_as_there_are_sentences_find_the_likeliest_of_all(kind):
    model = make_translator(kind, vocabulary=3, loud=1.5)
    every = [s for n in range(1, 5) for s in itertools.product(range(3), repeat=n) if s[-1] == 2 or n == 4]
    every = [s for s in every if 2 not in s[:-1]]
    (found,) = translate(model, [[0, 1, 1, 2]], end=2, beams=81, longest=4, length_penalty=0.0)
    best = max(every, key=lambda s: log_probability_of(model, s))
    assert tuple(found.tokens) == best


def log_probability_of(model, tokens) -> float:
    with torch.no_grad():
        logits = model(*pad_sentences([[0, 1, 1, 2]]), torch.tensor([[2, *tokens[:-1]]]))[0]
    return float(logits.log_softmax(-1)[range(len(tokens)), list(tokens)].sum())


@pytest.mark.parametrize("beams", [1, 3])
def test_a_translation_has_at_most_twice_the_words_of_its_source_and_ten_more(beams):
    model, sources = endless(), sentences(7, 2, 4)
    assert [len(one.tokens) for one in translate(model, sources, end=END, beams=beams)] == [24, 14, 18]
    assert [len(one.tokens) for one in translate(model, sources, end=END, beams=beams, longest=3)] == [3, 3, 3]
    short = endless(context=15)
    assert [len(one.tokens) for one in translate(short, sources, end=END, beams=beams)] == [15, 14, 15]


def endless(**other):
    """A translator that never says the end."""
    model = make_translator("transformer", tied=False, **other)
    with torch.no_grad():
        model.vocabulary.head.weight.mul_(0)
        model.vocabulary.head.bias = torch.nn.Parameter(torch.zeros(VOCABULARY).double())
        model.vocabulary.head.bias[END] = -50
    return model


@pytest.mark.slow
def test_results_come_in_the_order_of_the_sources_whatever_went_together():
    model, sources = make_translator("additive"), sentences(9, 2, 7, 3, 3, 8, 1)
    expected = [translate(model, [source], end=END)[0].tokens for source in sources]
    for batch in (1, 2, 3, 64):
        assert [one.tokens for one in translate(model, sources, end=END, batch=batch)] == expected
    assert translate(model, [], end=END) == []


def test_what_cannot_be_translated_is_refused():
    model = make_translator("plain")
    with pytest.raises(DataError, match="this translator has no vocabulary"):
        translate(model, [[1, END]])
    with pytest.raises(ConfigError, match="beams must be a whole number of at least 1, got 0"):
        translate(model, [[1, END]], end=END, beams=0)
    with pytest.raises(ConfigError, match="longest must be"):
        translate(model, [[1, END]], end=END, longest=0)
    with pytest.raises(DataError, match="53 is not a token"):
        translate(model, [[1, 53]], end=END)
