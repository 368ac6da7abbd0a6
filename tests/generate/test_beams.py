import itertools
import math

import pytest
import torch

from bounds import EXPONENTIAL, assert_within, is_stable_under_rounding, sum_bound
from generate.small_models import Table, gpt2, hugging_face, rows, stack_tokens, table
from regard.generate import generate
from regard.generate.beams import search_beams

N, END = 11, 5
SETTINGS = [{}, {"length_penalty": 0.0}, {"length_penalty": 2.0}, {"repetition_penalty": 1.5}]


def theirs(model, prompts, beams, count, end=END, **asked):
    """Sequences and scores of transformers."""
    found = hugging_face(model).generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=count,
        num_beams=beams,
        do_sample=False,
        eos_token_id=end,
        pad_token_id=end,
        return_dict_in_generate=True,
        output_scores=True,
        **asked,
    )
    return found.sequences[:, prompts.shape[1] :], found.sequences_scores


@pytest.mark.slow
@pytest.mark.parametrize("beams", [2, 3, 5])
def test_the_sequences_are_those_of_transformers(beams):
    ended = []
    for (seed, n), asked in itertools.product(((0, N), (3, 5), (10, N), (17, 5), (22, N)), SETTINGS):
        model = gpt2(seed, vocabulary=n, loud=4.0)
        prompts = torch.tensor(rows(7, 7, 7, vocabulary=n, seed=seed))
        end = int(stack_tokens(model.generate(prompts, 4, temperature=0))[0, 3])  # one that is likely to come
        expected, _ = theirs(model, prompts, beams, 19, end, **asked)

        def sequences(one, prompts=prompts, end=end, asked=asked):
            return stack_tokens(one.generate(prompts, 19, beams=beams, end=end, **asked)).tolist()

        assert is_stable_under_rounding(model, sequences, n + EXPONENTIAL)  # their scores are in float32
        assert sequences(model) == expected.tolist()
        ended += (expected == end).any(1).tolist()
    assert {*ended} == {True, False}  # and so both were compared


def test_the_scores_are_those_of_transformers():
    model = gpt2(1, vocabulary=N, loud=4.0)
    prompts = torch.tensor(rows(7, 7, vocabulary=N))
    _, expected = theirs(model, prompts, 3, 9)
    texts, sizes = prompts.tolist(), []

    def read():
        with torch.no_grad():
            logits = model(torch.tensor(texts))[:, -1]
        sizes.append(float(logits.abs().max()))
        return logits.log_softmax(-1)

    def step(parents, tokens):
        texts[:] = [[*texts[parent], token] for parent, token in zip(parents.tolist(), tokens, strict=True)]
        return read()

    found = search_beams(read(), step, 3, 9, lambda tokens: tokens[-1] == END)
    # theirs rounds the logits to float32, and then their log-softmax and its sum: of each token |logit| and |log Σ exp| come in
    allowed = sum_bound(torch.float32, N + EXPONENTIAL + 9, 2 * max(sizes) + math.log(N))
    assert_within(torch.tensor([row[0].score for row in found], dtype=torch.float64), expected, allowed)
    assert all([one.score for one in row] == sorted((one.score for one in row), reverse=True) for row in found)


@pytest.mark.parametrize("length_penalty", [0.0, 1.0])
def test_as_many_beams_as_there_are_sequences_find_the_best_of_all(length_penalty):
    model = table(3, seed=4)
    steps = model.logits.log_softmax(-1)
    every = [s for length in range(1, 5) for s in itertools.product(range(3), repeat=length) if (s[-1] == 2) or length == 4]
    every = [s for s in every if 2 not in s[:-1]]
    scores = {s: sum(float(steps[a, b]) for a, b in zip((0, *s), s, strict=False)) / len(s) ** length_penalty for s in every}
    found = stack_tokens(generate(model, [0], 4, beams=81, end=2, length_penalty=length_penalty))[0].tolist()
    best = max(scores, key=scores.__getitem__)
    assert tuple(found[: len(best)]) == best


def test_each_of_a_ragged_batch_is_searched_as_it_would_be_alone():
    model = gpt2(2, vocabulary=N, loud=4.0)
    prompts = rows(3, 7, 5, vocabulary=N)
    together = stack_tokens(model.generate(prompts, 9, beams=4, end=END))
    for prompt, found in zip(prompts, together, strict=True):
        alone = stack_tokens(model.generate(prompt, 9, beams=4, end=END))[0]
        assert torch.equal(found[: len(alone)], alone)
        assert (found[len(alone) :] == END).all()


def test_one_beam_is_greedy():
    model = gpt2(3, vocabulary=N, loud=4.0)
    (prompt,) = rows(5, vocabulary=N)
    with torch.no_grad():
        texts = [prompt]

        def step(parents, tokens):
            texts[:] = [[*texts[0], *tokens]]
            return model(torch.tensor(texts))[:, -1].log_softmax(-1)

        found = search_beams(model(torch.tensor(texts))[:, -1].log_softmax(-1), step, 1, 9, lambda tokens: False)
    assert found[0][0].tokens == stack_tokens(model.generate(prompt, 9, temperature=0))[0].tolist()


def test_a_string_ends_a_sequence_of_beams():
    class Letters:
        def bytes(self, ids):
            return bytes(ord("a") + number for number in ids)

    upwards = Table(torch.eye(N).roll(1, 1) * 5)
    found = stack_tokens(generate(upwards, [[0], [2]], 9, beams=3, stop="de", text=Letters(), end=0))
    assert [Letters().bytes(row).decode() for row in found.tolist()] == ["bcde", "deaa"]
