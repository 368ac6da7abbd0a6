import unicodedata

import pytest
import torch
from recipes.lineage.word_alignment import align, group_by_word, merge_weights

from models.translators import Weights
from regard.errors import DataError
from regard.generate.translation_search import END_LABEL
from regard.models.recurrent import RecurrentTranslator
from regard.models.transformer import Transformer
from regard.text import BytePair

SOURCE, TARGET = "The cat, that was on the mat, jumped.", "Le chat, qui était là, a sauté."
LINES = [SOURCE, TARGET, "the man is sitting", "l'homme est assis"] * 3


@pytest.fixture(scope="module")
def text():
    return BytePair.train(LINES, 300)


def make_model(kind, text):
    torch.manual_seed(0)
    if kind == "transformer":
        model = Transformer(vocabulary=text.vocabulary, width=12, heads=3, layers=2)
    else:
        model = RecurrentTranslator(kind, vocabulary=text.vocabulary, width=11, hidden=7)
    model.text = text
    return model.double().eval()


def test_merged_rows_are_the_mean_and_merged_columns_the_sum():
    weights = torch.rand(3, 7, 11, dtype=torch.float64).softmax(-1)
    rows, columns = [0, 0, 0, 1, 2, 2, 3], [0, 1, 1, 2, 3, 3, 3, 3, 4, 5, 5]
    found = merge_weights(weights, rows, columns)
    assert found.shape == (3, 4, 6)
    for row in range(4):
        for column in range(6):
            here = [n for n, one in enumerate(rows) if one == row]
            cells = weights[:, here][..., [n for n, one in enumerate(columns) if one == column]]
            torch.testing.assert_close(found[:, row, column], cells.sum(-1).mean(-1))
    torch.testing.assert_close(found.sum(-1), torch.ones(3, 4, dtype=torch.float64))


def test_pieces_belong_to_the_words_that_white_space_and_signs_divide(text):
    said = "l'homme-là, était (assis)... don't"
    tokens = text.encode(said)
    numbers, words = group_by_word(text, tokens)
    assert words == ["l'homme-là", ",", "était", "(", "assis", ")...", "don't"]
    assert len(tokens) == len(numbers) > len(words)
    assert numbers == sorted(numbers)
    assert {*numbers} == {*range(len(words))}


@pytest.mark.parametrize(
    "words",
    [
        ["l'été", "était", "là", ",", "déjà", "."],
        [unicodedata.normalize("NFD", word) for word in ["l'été", "là", ",", "déjà", "."]],
        ["हिन्दी", "में", "लिखा", "।"],
        ["שָׁלוֹם", "עולם", "!"],
        ["a", "❤️", "b", "👩‍🚀"],
    ],
)
def test_an_accent_or_a_vowel_sign_belongs_to_the_word_of_its_letter(words):
    text = BytePair.train(["a"], 257)
    said = " ".join(words)
    numbers, found = group_by_word(text, text.encode(said))
    assert found == words
    assert numbers == sorted(numbers)


@pytest.mark.parametrize("kind", ["additive", "transformer"])
def test_each_row_is_of_the_query_that_predicts_its_word(kind, text):
    model, end = make_model(kind, text), text.end
    asked, written = text.encode(SOURCE), text.encode(TARGET)
    found = align(model, SOURCE, TARGET)
    assert found.source == ["The", "cat", ",", "that", "was", "on", "the", "mat", ",", "jumped", ".", END_LABEL]
    assert found.target == ["Le", "chat", ",", "qui", "était", "là", ",", "a", "sauté", ".", END_LABEL]
    assert found.weights.shape == (2 if kind == "transformer" else 1, 11, 12)
    torch.testing.assert_close(found.weights.sum(-1), torch.ones(found.weights.shape[:2], dtype=torch.float64))
    with Weights() as seen, torch.no_grad():  # of a prefix alone the last row is the query that foretells what follows
        model(torch.tensor([[*asked, end]]), torch.tensor([len(asked) + 1]), torch.tensor([[end, *written]]))
    last = seen.found[-1][0, :, -1].mean(0)  # of the last layer, or the last word: that before the end
    torch.testing.assert_close(found.weights[-1, -1, -1], last[-1])
    assert found.weights[-1, -1, 0] == pytest.approx(
        float(last[: sum(n == 0 for n in group_by_word(text, asked)[0])].sum()), abs=1e-10
    )


def test_a_model_without_attention_and_a_sentence_without_words_are_refused(text):
    with pytest.raises(DataError, match="no attention"):
        align(make_model(None, text), SOURCE, TARGET)
    with pytest.raises(DataError, match="no word"):
        align(make_model("additive", text), SOURCE, " ")
