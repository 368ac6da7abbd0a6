"""The loss, the distributions and the needles of a model with a policy."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import regard
from policy_audit.small_models import PROMPT, VOCABULARY, draw_tokens, make_model
from regard import ConfigError, DataError, ShapeError
from regard.policies import Knorm, StreamingLLM
from regard.policy_audit import ApplyPolicy, NeedleTask, find_needles, make_needle_tasks, measure_downstream
from regard.policy_audit.needle_tasks import KINDS


class Letters:
    """A vocabulary of characters."""

    def encode(self, text):
        return list(map(ord, text))


HAYSTACK = "The grass is green. The sky is blue. The sun is yellow. Here we go. " * 40
TASK = NeedleTask("single", (1, 2, 3), 1, 2)
NUMBER = re.compile(r"\nThe magic number of the (\w+) is (\d{5})\.\n")


def decode(tokens):
    return "".join(map(chr, tokens))


def test_loss_divergence_and_agreement_are_those_of_the_logits():
    model, tokens = make_model(), draw_tokens()
    policy = StreamingLLM(1, 4)
    (found,) = measure_downstream(model, tokens, [policy], prompt=PROMPT)
    with torch.no_grad():
        complete = model(tokens)[:, PROMPT:-1].softmax(-1)
        with regard.intervene(model, ApplyPolicy(policy, PROMPT)):
            changed = model(tokens)[:, PROMPT:-1].softmax(-1)
    targets = tokens[:, PROMPT + 1 :].unsqueeze(-1)
    losses = [float(-p.gather(-1, targets).log().mean()) for p in (complete, changed)]
    assert found.loss == pytest.approx(losses[1], rel=1e-5)
    assert found.change == pytest.approx(losses[1] - losses[0], rel=1e-4)
    assert found.kl == pytest.approx(float((complete * (complete / changed).log()).sum(-1).mean()), rel=1e-4)
    assert found.agreement == float((complete.argmax(-1) == changed.argmax(-1)).double().mean())


def test_a_policy_that_keeps_everything_changes_nothing():
    (found,) = measure_downstream(make_model(), draw_tokens(), [Knorm(1.0)], prompt=PROMPT)
    assert max(found.residual) < 1e-9
    assert abs(found.change) < 1e-6
    assert found.kl < 1e-6
    assert found.agreement == 1


def test_a_needle_is_found_if_the_greedy_answer_is_right():
    model, tokens = make_model(), draw_tokens(1)[0].tolist()
    with torch.no_grad():
        written = [int(token) for token in model.generate(torch.tensor([tokens]), 3, temperature=0)]
    right = NeedleTask("single", (*tokens, *written), PROMPT, len(tokens))
    wrong = NeedleTask("single", (*tokens, *written[:2], (written[2] + 1) % VOCABULARY), PROMPT, len(tokens))
    complete, same, other = find_needles(model, [right, wrong], [Knorm(1.0), StreamingLLM(0, 1)])
    assert complete == same == [True, False]
    assert other == [False, False]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "common words"])
def test_a_task_hides_its_needles_in_the_context_and_ends_with_its_answer(kind):
    haystack = "The grass is green. " * 200
    for task in make_needle_tasks(Letters(), haystack, length=900, kinds=[kind], count=3, seed=7):
        context, question, answer = (
            decode(task.tokens[part])
            for part in (slice(task.context), slice(task.context, task.answer), slice(task.answer, None))
        )
        assert len(task.tokens) == 900
        assert question.startswith("\n")
        for part in answer.strip().split(", "):
            assert part in context
        places = [context.find(f"{part}") for part in answer.strip().split(", ")]
        assert places == sorted(places) or kind == "variable tracking"


def read_task(task):
    """The text before the question, the question, and the parts of the answer."""
    parts = slice(task.context), slice(task.context, task.answer), slice(task.answer, None)
    context, question, answer = (decode(task.tokens[part]) for part in parts)
    return context, question, answer.strip().split(", ")


@settings(max_examples=40, deadline=None)
@given(st.integers(400, 1500), st.integers(0, 2**30))
def test_a_task_has_the_needles_of_its_kind_whole_and_its_answer_follows_from_them(length, seed):
    tasks = {
        task.kind: task for task in make_needle_tasks(Letters(), HAYSTACK, length=length, kinds=KINDS[:4], count=1, seed=seed)
    }
    assert {len(task.tokens) for task in tasks.values()} == {length}
    (single, question, answer), (many, asked, chosen) = read_task(tasks["single"]), read_task(tasks["multi key"])
    assert NUMBER.findall(single) == [(question.split()[-2], answer[0])]
    numbers = dict(NUMBER.findall(many))
    assert len(numbers) == len(set(numbers.values())) == 4
    assert [numbers[asked.split()[-2]]] == chosen
    listed, question, answer = read_task(tasks["multi value"])
    found = re.findall(r"\nA magic number of the (\w+) is (\d{5})\.\n", listed)
    assert {key for key, _ in found} == {question.split()[5].rstrip(",")}
    assert [number for _, number in found] == answer
    chain, question, answer = read_task(tasks["variable tracking"])
    (first, number), *others = re.findall(r"\nSet (\w) = (\w+)\.\n", chain)
    assert number in question
    assert [first, *(name for name, _ in others)] == answer
    assert [value for _, value in others] == answer[:-1]


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: make_needle_tasks(Letters(), "short", length=900), DataError, "the text has 5 tokens"),
        (lambda: make_needle_tasks(Letters(), "short" * 300, length=20), DataError, "tasks of 20 tokens"),
        (lambda: make_needle_tasks(Letters(), "short" * 300, length=900, kinds=["other"]), ConfigError, "a kind"),
        (lambda: make_needle_tasks(Letters(), "few", length=900, kinds=["common words"]), DataError, "two different words"),
        (
            lambda: make_needle_tasks(Letters(), "some words", length=200, kinds=["common words"]),
            DataError,
            "needs [34]\\d\\d tokens",
        ),
        (lambda: find_needles(make_model(), []), ConfigError, "no tasks"),
        (lambda: find_needles(make_model(), [TASK], [7]), ConfigError, "a policy must be a Policy"),
        (lambda: find_needles(make_model(), [TASK], 7), ConfigError, "policies"),
        (lambda: find_needles(make_model(), [TASK], "h3o"), ConfigError, "there is no policy 'h3o'"),
        (lambda: measure_downstream(make_model(), torch.ones(3), [Knorm()], prompt=3), ShapeError, "whole numbers"),
        (lambda: measure_downstream(make_model(), draw_tokens(), [Knorm()], prompt=99), ConfigError, "prompt"),
    ],
)
def test_bad_input_gets_a_sentence(call, error, says):
    with pytest.raises(error, match=says):
        call()
