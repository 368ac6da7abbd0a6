from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attribution.small_models import C, E, G, H, N, make_model
from regard.observe.classification.head_kinds import SUCCESSION
from regard.observe.head_table import Head
from regard.observe.score_interval import Score, estimate_share
from regard.probe.succession import SEQUENCES, Succession, make_successions, measure_succession

SEQUENCE = (5, 11, 7, 30, 22, 9)
STEPS = [Succession(one, other, SEQUENCE) for one, other in pairwise(SEQUENCE)]


class Words:
    """A vocabulary of whole words, some of which are two tokens."""

    def __init__(self, spaced: bool, split: tuple[str, ...] = ()) -> None:
        self.spaced, self.split = spaced, split
        self.numbers: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        if text.strip() in self.split or text.startswith(" ") != self.spaced:
            return [0, 1]
        return [self.numbers.setdefault(text, len(self.numbers) + 2)]


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@torch.no_grad()
def test_the_score_is_the_share_of_steps_at_which_the_head_raises_the_next_token_most(name):
    model = make_model(name)
    found = measure_succession(model, STEPS)
    norm = model.transformer.ln_f if name == "gpt2" else model.model.norm
    hits = torch.zeros(2, H, len(STEPS))
    for n, step in enumerate(STEPS):
        inputs = []
        layers = model.transformer.h if name == "gpt2" else model.model.layers
        handles = [
            (layer.attn if name == "gpt2" else layer.self_attn).register_forward_pre_hook(
                lambda _, args, kwargs, kept=inputs: kept.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
            )
            for layer in layers
        ]
        model(torch.tensor([[1, step.token]]))
        for handle in handles:
            handle.remove()
        for layer, block in enumerate(layers):
            x = inputs[layer][0, -1].double()
            if name == "gpt2":
                value = (x @ block.attn.c_attn.weight.double() + block.attn.c_attn.bias.double())[2 * C :].view(H, E)
                output = block.attn.c_proj.weight.double().view(H, E, C)
            else:
                value = (block.self_attn.v_proj.weight.double() @ x).view(G, E).repeat_interleave(H // G, 0)
                output = block.self_attn.o_proj.weight.double().T.view(H, E, C)
            written = torch.einsum("he,hec->hc", value, output)
            written = written - (written.mean(-1, keepdim=True) if name == "gpt2" else 0)
            logits = (written * norm.weight.double()) @ model.lm_head.weight.double().T
            best = logits[:, list(SEQUENCE)].argmax(-1)
            hits[layer, :, n] = (torch.tensor(SEQUENCE)[best] == step.following).float()
    assert 0 < hits.mean() < 1
    for (layer, head), score in found.items():
        expected = estimate_share(int(hits[layer, head].sum()), len(STEPS))
        assert (score, score.low, score.high, score.count) == (expected, expected.low, expected.high, len(STEPS))
    assert len(found) == 2 * H


@torch.no_grad()
def test_a_planted_successor_head_has_the_score_one():
    model = make_model("llama")
    block, embedding = model.model.layers[0], model.model.embed_tokens.weight
    torch.nn.init.orthogonal_(embedding)
    embedding.mul_(C**0.5 / embedding.norm(dim=1, keepdim=True))
    model.lm_head.weight.zero_()
    for norm in (block.input_layernorm, model.model.norm):
        norm.weight.fill_(1.0)
    value, output = torch.zeros(G * E, C), torch.zeros(C, H * E)
    for n, step in enumerate(STEPS):  # the value says which step it is, and the output writes the next token's direction
        value[n] = torch.linalg.pinv(embedding[list(SEQUENCE)]).T[n]
        direction = torch.nn.functional.one_hot(torch.tensor(n), C).float()
        output[:, n] = direction
        model.lm_head.weight[step.following] = direction
    block.self_attn.v_proj.weight.copy_(value)
    block.self_attn.o_proj.weight.copy_(output)
    scores = measure_succession(model, STEPS)
    assert scores[0, 0] == 1.0
    assert 0.5 < scores[0, 0].low < 0.6  # of five steps
    assert max(score for place, score in scores.items() if place != (0, 0)) < 1


@given(st.booleans())
def test_sequences_are_taken_in_the_spelling_that_is_a_token(spaced):
    vocabulary = Words(spaced)
    successions = make_successions(vocabulary)
    assert len(successions) == sum(len(sequence.split()) - 1 for sequence in SEQUENCES)
    names = {number: text for text, number in vocabulary.numbers.items()}
    assert all(names[step.token].startswith(" ") == spaced for step in successions)
    following = {(names[step.token].strip(), names[step.following].strip()) for step in successions}
    assert {("Sunday", "Monday"), ("December", "January"), ("nine", "ten"), ("Y", "Z"), ("8", "9")} <= following


def test_words_of_several_tokens_are_left_out_and_so_are_sequences_with_few_left():
    weekdays = ("Tuesday", "Thursday", "Saturday")
    steps = make_successions(Words(True, weekdays))
    assert not any(len(step.sequence) == 7 for step in steps)
    steps = make_successions(Words(True, ("Wednesday",)))
    days = [step for step in steps if len(step.sequence) == 6]
    assert len(days) == 5


def test_the_sentence_names_a_successor_head_only_where_its_interval_is_above_a_half():
    scores = {"breadth": Score(0.1, 0.1, 0.1, 9), SUCCESSION: Score(0.8, 0.7, 0.9, 70)}
    assert (
        "a successor head: raises the next of a sequence in 0.80 (0.70 to 0.90)" in Head(0, "a", 0, "unclear", scores).sentence
    )
    scores[SUCCESSION] = Score(0.8, 0.4, 1.0, 5)
    assert "successor" not in Head(0, "a", 0, "unclear", scores).sentence
    assert max(SEQUENCE) < N
