from types import SimpleNamespace

import pytest
import torch
from transformers import BartConfig, BartForConditionalGeneration, GPT2Config, GPT2LMHeadModel

from regard import ConfigError, ShapeError, page, record
from regard.observe.recorded_runs import words
from regard.show.axis_words import get_axis_words
from regard.show.page.recording_entry import HeadPlace, RecordingEntry

CPU = torch.device("cpu")
SIDES = {"layers": 2, "attention_heads": 2, "ffn_dim": 8}


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


class Pooling(torch.nn.Module):
    """Two layers, of which the second reads the means of pairs of tokens."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2))

    def forward(self, x):
        x = self.layers[0](x, x, x)[0]
        x = x.unflatten(1, (-1, 2)).mean(2)
        return self.layers[1](x, x, x)[0]


def test_words_are_shown_on_layers_of_their_number_and_on_no_other(tmp_path):
    with record(model := Pooling()) as recording:
        model(torch.randn(3, 14, 8))
    for layer, n in enumerate((14, 7)):
        own = [[f"{row}{place}" for place in range(n)] for row in "abc"]
        for given in (own[0], own, [own[0], own[1][:-2], own[2]]):
            recording.tokens = given
            assert recording.words(1 - layer) == (None, None)
            numbers = [str(place) for place in range(n)]
            expected = given if isinstance(given[0], str) else [one if len(one) == n else numbers for one in given]
            assert recording.words(layer) == (expected, expected)
            page(recording, tmp_path / "pooling.html")
        recording.tokens = own[:2]  # of two of three sentences
        assert recording.words(layer) == (None, None)
    for wrong in (13, 15, 8):
        with pytest.raises(ConfigError, match=rf"got {wrong} words, but the layers have 7, 14 tokens"):
            recording.tokens = ["x"] * wrong
        assert recording.tokens == own[:2]


GENERATIONS = {
    "cached": {},
    "without a cache": {"use_cache": False},
    "one word": {"max_new_tokens": 1},
    "guesses": {"prompt_lookup_num_tokens": 3},
    "samples": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 4, "num_return_sequences": 2},
    "all beams": {"num_beams": 3, "num_return_sequences": 3},
}


@pytest.mark.parametrize("name", GENERATIONS)
def test_a_row_has_the_word_that_it_read_and_the_word_that_nothing_read_has_none(name):
    torch.manual_seed(0)
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 53, "bos_token_id": 0, "eos_token_id": None}
    model = GPT2LMHeadModel(GPT2Config(**sizes)).eval()
    prompt = torch.randint(3, 53, (1 if name == "guesses" else 2, 4)).repeat(1, 2)
    prompt[1:, :3] = 0  # padding on the left
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "attention_mask": (prompt != 0).long()}
    with record(model) as recording:
        written = model.generate(prompt, **{**options, **GENERATIONS[name]})
    b, _, q, k = recording.map(0).shape
    spelled = [[f"w{n}" for n in row] for row in written.tolist()]
    recording.tokens = spelled if len(spelled) > 1 else spelled[0]
    rows, columns = recording.words(0)
    assert rows == columns
    rows = rows if len(written) > 1 else [rows]
    assert [len(row) for row in rows] == [q] * b == [k] * b
    for sequence, row in zip(spelled, recording.last.rows, strict=True):
        assert rows[row] == sequence[:q]
    others = {*range(b)} - {*recording.last.rows}
    assert all(rows[row] == [str(n) for n in range(q)] for row in others)
    recording.tokens = lambda ids: [f"w{n}" for n in ids]  # every row has its own, of other beams too
    decoded = recording.words(0)[0]
    assert ([decoded] if b == 1 else decoded) == [[f"w{n}" for n in row] for row in recording.last.ids.tolist()]


@pytest.mark.parametrize(
    "options", [{"num_beams": 4, "num_return_sequences": 2}, {"do_sample": True, "num_return_sequences": 3}]
)
def test_each_row_of_a_translation_has_the_words_of_its_own_source(options, tmp_path):
    torch.manual_seed(0)
    sides = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in SIDES.items()}
    ends = {"bos_token_id": 0, "eos_token_id": None, "forced_eos_token_id": None, "decoder_start_token_id": 2}
    model = BartForConditionalGeneration(
        BartConfig(vocab_size=53, d_model=16, pad_token_id=0, init_std=0.5, **sides, **ends)
    ).eval()
    source = torch.randint(3, 53, (2, 7))
    with record(model) as recording:
        written = model.generate(source, **{"max_new_tokens": 4, "do_sample": False, **options})
    spelled = {"rows": [[f"t{n}" for n in row] for row in written.tolist()]}
    spelled["columns"] = [[f"s{n}" for n in row] for row in source.tolist()]
    recording.tokens = spelled
    b, _, q, k = recording.map(0, kind="cross").shape
    rows, columns = recording.words(0, "cross")
    assert columns == [spelled["columns"][row // (b // 2)] for row in range(b)]
    assert [len(row) for row in rows] == [q] * b
    assert all(rows[row] == words[:q] for row, words in zip(recording.last.rows, spelled["rows"], strict=True))
    assert recording.words(0, part="encoder") == (spelled["columns"],) * 2
    page(recording, tmp_path / "beams.html")
    entry = RecordingEntry("r1", recording)
    for row in range(b):
        assert entry.get_axis_words(HeadPlace("cross", "decoder", row)) == (rows[row], columns[row])
        assert entry.get_axis_words(HeadPlace("self", "decoder", row)) == (rows[row], rows[row])
        assert get_axis_words(recording, 0, "cross", "decoder", row, (q, k)) == (rows[row], columns[row])
    for row in range(2):
        assert entry.get_axis_words(HeadPlace("self", "encoder", row)) == (spelled["columns"][row],) * 2
    recording.tokens = SimpleNamespace(pieces=lambda ids: [f"s{n}" for n in ids])
    assert recording.words(0, "cross")[1] == columns
