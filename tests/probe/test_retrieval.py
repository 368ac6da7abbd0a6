import math

import pytest
import torch

from attribution.small_models import make_model
from probe.induction_model import CONTEXT, VOCABULARY, make_induction_model
from regard import DataError
from regard.models import GPT2
from regard.probe.retrieval import (
    DEPTHS,
    NEEDLES,
    NeedlePrompt,
    make_needle_prompts,
    measure_retrieval,
    score_prompt,
    write_greedily,
)

TEXT = "the cat and the dog went to the park to play with a ball. " * 60


@pytest.mark.parametrize("length", [100, 300])
def test_a_prompt_hides_the_needle_at_its_depth_and_ends_with_its_beginning(length):
    vocabulary = GPT2.load("pocket").text
    prompts = make_needle_prompts(vocabulary, TEXT, length=length)
    assert len(prompts) == len(DEPTHS) * len(NEEDLES)
    places = [(needle, depth) for needle in NEEDLES for depth in DEPTHS]
    for prompt, ((question, answer), depth) in zip(prompts, places, strict=True):
        text = vocabulary.decode(prompt.tokens)
        assert len(prompt.tokens) <= length
        assert text.endswith(question)
        assert text.count(question) == 2
        assert text.count(answer) == 1
        hidden = vocabulary.decode([prompt.tokens[key] for key in prompt.needle])
        assert hidden.strip() == answer.strip()
        assert prompt.needle.start / length == pytest.approx(depth, abs=0.35 if length == 100 else 0.15)


def test_a_text_that_is_too_short_is_refused():
    with pytest.raises(DataError, match=r"prompts of 300 tokens need"):
        make_needle_prompts(GPT2.load("pocket").text, "too short", length=300)
    with pytest.raises(DataError, match=r"prompts of 20 tokens need"):
        make_needle_prompts(GPT2.load("pocket").text, TEXT, length=20)


@torch.no_grad()
def test_scores_are_those_of_the_published_rule_on_dense_matrices():
    """The keys of the needle, of its number, that have the largest weight at a step at which their token is written."""
    model = make_model("llama")
    torch.manual_seed(1)
    tokens = tuple(torch.randint(3, 61, (20,)).tolist())
    prompt = NeedlePrompt(tokens, range(2, 14))
    written = [int(token) for token in torch.randint(3, 61, (12,))]
    written[::2] = [tokens[4]] * 6  # some of what is written is in the needle
    found = dict(score_prompt(model, prompt, written))
    model.set_attn_implementation("eager")
    matrices = model(torch.tensor([[*tokens, *written]]), output_attentions=True).attentions
    for (layer, head), score in found.items():
        hits = set()
        for step, token in enumerate(written):
            key = int(matrices[layer][0, head, len(tokens) - 1 + step, : len(tokens) + step].argmax())
            hits |= {key} if key in prompt.needle and [*tokens, *written][key] == token else set()
        assert score == pytest.approx(len(hits) / 12)
    assert len(found) == 8
    assert any(found.values())


def make_prompts(count=4):
    prompts = []
    for seed in range(count):
        tokens = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(seed))[:26].tolist()
        prompts.append(NeedlePrompt((*tokens, tokens[5]), range(6, 12 + seed)))
    return prompts


def test_the_planted_induction_head_retrieves_and_the_others_do_not():
    scores, answered = measure_retrieval(make_induction_model(0), make_prompts())
    assert answered == 4
    assert scores[1, 0] == pytest.approx(1)
    assert scores[1, 0].count == 4
    assert max(scores[0, 0], scores[0, 1], scores[1, 1]) < 0.2


@torch.no_grad()
def test_a_head_that_copies_the_needle_again_and_again_has_copied_it_once():
    tokens = tuple(torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(0))[:9].tolist())
    prompt = NeedlePrompt((*tokens, tokens[2]), range(3, 6))
    written = [*tokens[3:], tokens[2]] * 3  # from the needle to the end, and the question again
    scores = dict(score_prompt(make_induction_model(0), prompt, written[: CONTEXT - 10]))
    assert scores[1, 0] == pytest.approx(1)


def test_a_model_that_does_not_answer_has_no_score():
    torch.manual_seed(0)
    scores, answered = measure_retrieval(make_model("gpt2"), [NeedlePrompt(tuple(range(3, 23)), range(5, 15))])
    assert answered == 0
    assert len(scores) == 8
    assert all(math.isnan(score) for score in scores.values())


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "a plain module", "own"])
def test_the_answer_is_the_likeliest_token_each_time(name):
    model = make_induction_model(0) if name == "own" else make_model("llama")
    tokens = list(range(3, 20))
    expected = list(tokens)
    for _ in range(9):
        found = model(torch.tensor([expected]))
        expected.append(int(getattr(found, "logits", found)[0, -1].argmax()))

    class Plain(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, ids):
            return self.inner(ids)

    subject = Plain() if name == "a plain module" else model
    assert write_greedily(subject, tokens, 9) == expected[len(tokens) :]
    if name == "own":
        assert len(write_greedily(model, tokens, 50)) == CONTEXT - len(tokens)
