import json
import math
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evaluate.small_gpt2 import gpt2
from regard import ConfigError, DataError
from regard.evaluate import lambada, stop_tokens
from regard.text import BytePair, Letters
from regard.text.corpus import documents

LETTERS = Letters("abcdefgh ")
FILE = Path(__file__).parents[2] / "../shared/data/eval/lambada_test.jsonl"
PASSAGES = ["ab cd efg", "a hh b", "abc def gh abc de", "c c", "aaaa bb ccc dddd abcdefgh"] * 3


@pytest.fixture(scope="module")
def model():
    return gpt2(LETTERS.vocabulary, 31)


def test_it_is_the_sum_of_log_probabilities_of_last_words_written_out(model):
    nats, right, tokens = 0.0, 0, 0
    for passage in PASSAGES:
        ids, rest = LETTERS.encode(passage), LETTERS.encode(passage.rpartition(" ")[0])
        probabilities = model(torch.tensor(ids))[:-1].softmax(-1).tolist()  # row n foretells token n + 1
        rows = probabilities[len(rest) - 1 :]
        word = ids[len(rest) :]
        nats -= sum(math.log(row[one]) for row, one in zip(rows, word, strict=True))
        right += all(row[one] == max(row) for row, one in zip(rows, word, strict=True))
        tokens += len(word)
    found = lambada(model, PASSAGES, LETTERS.encode, context=31)
    assert (found.passages, found.right, found.tokens) == (len(PASSAGES), right, tokens)
    assert found.nats == pytest.approx(nats, rel=1e-12)
    assert found.by_word == pytest.approx(math.exp(nats / len(PASSAGES)), rel=1e-12)
    assert found.by_token == pytest.approx(math.exp(nats / tokens), rel=1e-12)
    assert (found.right_filtered, found.accuracy_filtered) == (None, None)


@pytest.mark.slow
def test_a_word_is_right_where_writing_greedily_gives_it(model):
    tried = 0
    for prompt in product(range(9), repeat=2):
        blank, *word = (int(one) for one in model.generate(list(prompt), 3, temperature=0))
        if blank in (*prompt, *word):
            continue
        alphabet = list("abcdefghi")
        alphabet[blank] = " "  # what the model writes first is the blank before the word
        letters = Letters("".join(alphabet))
        wrong = [*word[:-1], next(one for one in range(9) if one not in (blank, *word))]
        assert lambada(model, [letters.decode([*prompt, blank, *word])], letters.encode).right == 1
        assert lambada(model, [letters.decode([*prompt, blank, *wrong])], letters.encode).right == 0
        tried += 1
    assert tried


@settings(max_examples=9)
@given(st.integers(1, 9))
def test_several_passages_at_once_are_what_they_are_one_at_a_time(model, batch):
    one, several = (lambada(model, PASSAGES, LETTERS.encode, batch=n, stop=[0, 1]) for n in (1, batch))
    assert several.nats == pytest.approx(one.nats, rel=1e-12)
    assert (several.right, several.right_filtered, several.tokens) == (one.right, one.right_filtered, one.tokens)


def make_table_model(table):
    """A model that holds likely what a table says comes after each token, the first of them most."""

    def model(tokens):
        logits = torch.zeros(*tokens.shape, 30)
        for row, ids in zip(logits, tokens.tolist(), strict=True):
            for place, token in zip(row, ids, strict=True):
                for rank, following in enumerate(table.get(token, ())):
                    place[following] = 9.0 - rank
        return logits

    return model


WORDS = ["see", " the", " cat", " of", "s", " a", " dog"]


def encode(text):
    return [
        WORDS.index(piece) for piece in text.replace(" ", "| ").replace("cats", "cat|s").replace("thes", "the|s").split("|")
    ]


@pytest.mark.parametrize(
    ("passage", "table", "plain", "filtered"),
    [
        ("see cat", {0: [2]}, 1, 1),
        ("see cat", {0: [1, 3, 2]}, 0, 1),  # the stop words are left out
        ("see cat", {0: [1, 6, 2]}, 0, 0),
        ("see the", {0: [1]}, 1, 0),  # a stop word is never the last one
        ("see cats", {0: [1, 2], 2: [4]}, 0, 1),
        ("see cats", {0: [2], 2: [1, 4]}, 0, 0),  # later tokens are free
        ("see thes", {0: [1], 1: [4]}, 1, 0),  # nor may it begin one
    ],
)
def test_stop_words_may_not_begin_the_last_word_where_they_are_left_out(passage, table, plain, filtered):
    stop = stop_tokens(WORDS)
    assert stop == [1, 3, 5]
    found = lambada(make_table_model(table), [passage], encode, stop=stop)
    assert (found.right, found.right_filtered) == (plain, filtered)


def test_a_model_that_sees_the_last_word_is_refused():
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = torch.nn.Sequential(torch.nn.Embedding(128, 8), layer, torch.nn.Linear(8, 128)).eval()
    with pytest.raises(ConfigError, match="change with later tokens"):
        lambada(model, ["the cat sat on the mat"], lambda text: list(text.encode()))


def test_a_passage_longer_than_the_context_keeps_its_end(model):
    long = "a " * 40 + "cd efg"
    cut = long[-12:]
    assert lambada(model, [long], LETTERS.encode, context=12).nats == pytest.approx(
        lambada(model, [cut], LETTERS.encode).nats, rel=1e-12
    )


@pytest.mark.parametrize(
    ("passages", "asked", "error", "says"),
    [
        (["word"], {}, DataError, "passage 0 has no last word after others: 'word'"),
        (["a b", " b "], {}, DataError, "passage 1 has no last word"),
        ([], {}, DataError, "passages is empty"),
        (["a bcdefgh"], {"context": 5}, DataError, "'bcdefgh' has 8 tokens, and the context is 5"),
        (["a b"], {"batch": 0}, ConfigError, "batch must be a whole number of at least 1"),
    ],
)
def test_what_is_no_passage_is_refused(model, passages, asked, error, says):
    with pytest.raises(error, match=says):
        lambada(model, passages, LETTERS.encode, **asked)


@pytest.mark.slow
@pytest.mark.skipif(not FILE.exists(), reason="needs ../shared/data/eval, the published texts, which this machine lacks")
def test_openais_file_has_5153_passages_whose_last_words_are_their_last_tokens():
    passages = list(documents(FILE))
    words = BytePair.gpt2()
    assert len(passages) == 5153
    assert [json.loads(line)["text"] for line in FILE.read_text(encoding="utf-8").splitlines()[:9]] == passages[:9]
    for passage in passages:
        before, blank, word = passage.rpartition(" ")
        assert words.encode(before) + words.encode(blank + word) == words.encode(passage)
