"""The loss, the distributions and the needles of a model with a policy."""

import pytest
import torch

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
    assert abs(found.change) < 1e-6
    assert found.kl < 1e-6
    assert found.agreement == 1


def test_a_needle_is_found_if_the_greedy_answer_is_right():
    model, tokens = make_model(), draw_tokens(1)[0].tolist()
    with torch.no_grad():
        written = [int(token) for token in model.generate(torch.tensor([tokens]), 3, temperature=0)]
    right = NeedleTask("single", (*tokens, *written), PROMPT, len(tokens))
    wrong = NeedleTask("single", (*tokens, *written[:2], (written[2] + 1) % VOCABULARY), PROMPT, len(tokens))
    assert find_needles(model, [right, wrong], None) == [True, False]
    assert find_needles(model, [right, wrong], Knorm(1.0)) == [True, False]


@pytest.mark.parametrize("kind", KINDS)
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


def test_tasks_are_the_same_for_a_seed_and_others_for_another():
    made = [make_needle_tasks(Letters(), "a b c d " * 300, length=800, seed=seed) for seed in (0, 0, 1)]
    assert made[0] == made[1] != made[2]


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: make_needle_tasks(Letters(), "short", length=900), DataError, "the text has 5 tokens"),
        (lambda: make_needle_tasks(Letters(), "short" * 300, length=20), DataError, "tasks of 20 tokens"),
        (lambda: make_needle_tasks(Letters(), "short" * 300, length=900, kinds=["other"]), ConfigError, "a kind"),
        (lambda: find_needles(make_model(), [], None), ConfigError, "no tasks"),
        (lambda: measure_downstream(make_model(), torch.ones(3), [Knorm()], prompt=3), ShapeError, "whole numbers"),
        (lambda: measure_downstream(make_model(), draw_tokens(), [Knorm()], prompt=99), ConfigError, "prompt"),
    ],
)
def test_bad_input_gets_a_sentence(call, error, says):
    with pytest.raises(error, match=says):
        call()
