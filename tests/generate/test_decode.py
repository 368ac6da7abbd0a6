from functools import partial

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import regard
from generate.small_models import SIZES, Table, gpt2, hugging_face, rows, stack_tokens
from regard import ConfigError, DataError
from regard.generate import Lookup
from regard.generate.decode import PieceDecoder
from run_limits import limit_examples

MODEL = gpt2()
CONTEXT, N = SIZES["context"], SIZES["vocabulary"]
LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=4)
LETTERS = st.text(alphabet="ab€é🙂", max_size=12)


def generate_without_cache(model, prompts, count, choose):
    """Generation as the lectures write it: all of the text through the model for every token."""
    texts = [torch.tensor(prompt) for prompt in prompts]
    with torch.no_grad():
        for _ in range(count):
            logits = [model(text[-model.config.context :])[-1] for text in texts]
            texts = [torch.cat([text, choose(one)]) for text, one in zip(texts, logits, strict=True)]
    return torch.stack([text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)])


def greedy(logits):
    return logits.argmax()[None]


@settings(max_examples=limit_examples(20))
@given(LENGTHS, st.integers(1, 9))
def test_with_the_cache_come_the_tokens_that_come_without(lengths, count):
    prompts = rows(*lengths)
    assert torch.equal(
        stack_tokens(MODEL.generate(prompts, count, temperature=0)), generate_without_cache(MODEL, prompts, count, greedy)
    )


@pytest.mark.parametrize("seed", range(5))
def test_greedy_is_that_of_transformers(seed):
    model = gpt2(seed, layers=3, heads=5, width=35, vocabulary=47)
    prompts = torch.tensor(rows(7, 7, vocabulary=47, seed=seed))
    theirs = hugging_face(model).generate(prompts, max_new_tokens=13, do_sample=False, attention_mask=torch.ones_like(prompts))
    assert torch.equal(stack_tokens(model.generate(prompts, 13, temperature=0)), theirs[:, 7:])


@settings(max_examples=limit_examples(20))
@given(LENGTHS, st.sampled_from([{}, {"top_k": 5}, {"top_p": 0.8, "temperature": 2.0}, {"repetition_penalty": 1.5}]))
def test_each_of_a_batch_draws_what_it_would_draw_alone(lengths, asked):
    prompts, seeds = rows(*lengths), list(range(5, 5 + len(lengths)))
    together = stack_tokens(MODEL.generate(prompts, 7, seed=seeds, **asked))
    for prompt, seed, found in zip(prompts, seeds, together, strict=True):
        assert torch.equal(stack_tokens(MODEL.generate(prompt, 7, seed=[seed], **asked))[0], found)


def test_tokens_come_one_at_a_time_as_they_are_asked_for():
    model = Table(torch.randn(N, N))
    steps = regard.generate.generate(model, [[1, 2, 3], [4]], 5)
    assert model.calls == []
    assert next(steps).shape == (2,)
    next(steps)
    assert model.calls == [(2, 3), (2, 1)]


class Letters:
    """A text of one letter a token, from a on."""

    def encode(self, text):
        return [ord(letter) - ord("a") for letter in text]

    def bytes(self, ids):
        return bytes(ord("a") + number for number in ids)


def test_more_than_the_context_holds_is_refused_before_anything_is_computed():
    model = Table(torch.randn(N, N), context=11)
    with pytest.raises(
        ConfigError, match=r"has 5 tokens, and 8 more are requested; the model reads at most 11. Ask for at most 7"
    ):
        regard.generate.generate(model, [[1] * 5, [1]], 8)
    with pytest.raises(ConfigError, match="Shorten it"):
        regard.generate.generate(model, [1] * 12, 1)
    assert model.calls == []
    assert stack_tokens(regard.generate.generate(model, [1] * 5, 7)).shape == (1, 7)  # the last token is not read


@pytest.mark.parametrize("length", [5, CONTEXT - 1, CONTEXT, CONTEXT + 7])
def test_sliding_reads_the_last_tokens_afresh(length):
    prompts = rows(length, 3)
    found = stack_tokens(MODEL.generate(prompts, CONTEXT + 3, temperature=0, past="slide"))
    assert torch.equal(found, generate_without_cache(MODEL, prompts, CONTEXT + 3, greedy))


def test_a_generation_that_is_recorded_is_one_run_and_its_maps_are_those_of_the_whole():
    (prompt,) = rows(5)
    with regard.record(MODEL) as recording:
        found = stack_tokens(MODEL.generate(prompt, 7, temperature=0))[0]
    with regard.record(MODEL) as whole, torch.no_grad():
        MODEL(torch.tensor([[*prompt, *found[:-1].tolist()]]))
    assert len(recording.runs) == 1
    for layer in range(SIZES["layers"]):
        torch.testing.assert_close(recording.map(layer).dense(), whole.map(layer).dense())


def test_a_text_ends_before_its_stop_string_and_before_the_end_of_text():
    model = Table(torch.eye(26).roll(1, 1) * 50)
    write = partial(regard.generate.complete, text=Letters())
    assert "".join(write(model, "e", 99, temperature=0, end=25)) == "fghijklmnopqrstuvwxy"
    assert "".join(write(model, "e", 99, temperature=0, stop="jkl")) == "fghi"
    assert "".join(write(model, "e", 99, temperature=0, stop=[9, "zzz"])) == "fghi"
    assert list(write(model, "e", 4, temperature=0, stop="hix")) == ["f", "g", "hi"]
    assert "".join(write(model, "y", 3, temperature=0, stop="jkl")) == "zab"


def test_an_empty_prompt_begins_with_the_end_of_text():
    model = Table(torch.eye(26).roll(1, 1) * 50)
    assert "".join(regard.generate.complete(model, "", 3, temperature=0, end=4, text=Letters())) == "fgh"
    with pytest.raises(DataError, match="the prompt is empty"):
        regard.generate.complete(model, "", 3, text=Letters())


def test_a_model_without_text_says_so():
    with pytest.raises(DataError, match="has no vocabulary"):
        gpt2().complete("a", 3)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"beams": 0}, "beams must be a whole number of at least 1"),
        ({"guesses": 1.5}, "guesses"),
        ({"past": "wrap"}, 'past must be "refuse" or "slide"'),
        ({"beams": 2, "top_k": 5}, "beam search does not sample"),
        ({"beams": 2, "temperature": 0.7}, "beam search does not sample"),
        ({"stop": ""}, "must have at least one character"),
        ({"stop": "x"}, "to stop at 'x' the model needs a vocabulary"),
        ({"draft": 3}, r"draft must be Lookup\(\) or a model .*; got 3"),
        ({"draft": "lookup"}, r"draft must be Lookup\(\) or a model .*; got 'lookup'"),
        ({"draft": Lookup}, r"draft must be Lookup\(\) or a model .*; got the class Lookup"),
        ({"draft": torch.nn.Linear(3, 3)}, r"draft must be Lookup\(\) or a model .*; got a Linear"),
        ({"after": 3}, r"after must be a PrefixCache, got 3\. Use PrefixCache\.read"),
    ],
)
def test_settings_that_do_not_go_together_are_refused_at_once(asked, says):
    with pytest.raises(ConfigError, match=says):
        MODEL.generate([1], 3, **asked)


@pytest.mark.parametrize("asked", [{"seed": 3}, {"temperature": 0, "beams": 2}])
@pytest.mark.parametrize("convert", [numpy.int64, numpy.uint8, torch.tensor])
def test_how_many_and_the_seed_are_integers_of_any_library(convert, asked):
    converted = asked | {name: convert(number) for name, number in asked.items() if name == "seed"}
    found, expected = MODEL.generate([1, 2], convert(4), **converted), MODEL.generate([1, 2], 4, **asked)
    assert torch.equal(stack_tokens(found), stack_tokens(expected))


@pytest.mark.parametrize("seed", [3.0, True, "3", torch.tensor([3, 4]), {3}])
def test_what_is_no_seed_says_what_one_is(seed):
    with pytest.raises(ConfigError, match="seed must be a"):
        MODEL.generate([1, 2], 4, seed=seed)


@st.composite
def cut(draw, texts=LETTERS):
    """A text, and its bytes cut anywhere."""
    text = draw(texts)
    data = text.encode()
    borders = sorted(draw(st.lists(st.integers(0, len(data)), max_size=9)))
    return text, [data[i:j] for i, j in zip([0, *borders], [*borders, len(data)], strict=True)]


@given(cut())
def test_the_pieces_of_a_text_are_the_text_wherever_it_is_cut(found):
    text, parts = found
    pieces = PieceDecoder()
    shown = [pieces.add(part) for part in parts]
    assert "".join(shown) == text  # and so no character waits for more than its last byte
    assert pieces.add(b"", last=True) == ""


@given(cut(), st.lists(st.text(alphabet="ab€", min_size=1, max_size=4), min_size=1, max_size=3))
def test_a_stop_string_ends_the_text_before_it_wherever_it_is_cut(found, stops):
    text, parts = found
    ends = [(text.index(stop) + len(stop), text.index(stop)) for stop in stops if stop in text]
    pieces = PieceDecoder(stops)
    shown = "".join([*(pieces.add(part) for part in parts), pieces.add(b"", last=True)])
    assert shown == (text[: min(ends)[1]] if ends else text)
    assert pieces.has_stopped == bool(ends)


def test_half_a_character_waits_and_is_written_at_the_end():
    pieces = PieceDecoder()
    assert [pieces.add(bytes([byte])) for byte in "é€".encode()] == ["", "é", "", "", "€"]
    assert pieces.add("€".encode()[:2]) == ""
    assert pieces.add(b"", last=True) == "\ufffd"
