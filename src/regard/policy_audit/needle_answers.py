"""Whether a model still finds what is hidden in a text, with a policy."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from regard.errors import ConfigError
from regard.evaluation_mode import evaluate_mode
from regard.generate.sequence_reader import compute_logits
from regard.mechanism.arguments import check_sequence
from regard.observe.intervene import intervene
from regard.policies import Policy
from regard.policies.parse_policy import Policies, list_policies
from regard.policy_audit.apply_policy import ApplyPolicy
from regard.policy_audit.audit import Watch
from regard.policy_audit.needle_tasks import NeedleTask
from regard.policy_audit.read_context import ReadContext


def find_needles(
    model: nn.Module,
    tasks: Sequence[NeedleTask],
    policies: Policies = (),
    watch: Watch = lambda tasks, count: tasks,
) -> list[list[bool]]:
    """Return which tasks are answered right: a list for the complete model, and then one for each policy.

    policies are values of regard.policies, or text as regard.policies.parse_policy takes it. A policy compresses the context
    before the question is read. An answer is right if each of its tokens is the likeliest after those before it, which is what
    greedy decoding writes. What the complete model does not answer is not tried with a policy, and False. A model of
    transformers reads each context once for all policies that leave the queries of the context as they are
    (`reads_whole_prompt`); otherwise there is one forward for each task and policy. Raises ConfigError without tasks.
    """
    if not check_sequence("tasks", tasks):
        raise ConfigError("there are no tasks: pass those of make_needle_tasks.")
    device = next(model.parameters()).device
    chosen = list_policies(policies)
    choices, is_shared = [None, *chosen], any(policy.reads_whole_prompt for policy in chosen)
    found = [[False] * len(tasks) for _ in choices]
    with evaluate_mode(model), torch.no_grad():
        for number, task in enumerate(watch(tasks, len(tasks))):
            ids = torch.tensor([task.tokens], device=device)
            context = ReadContext.read(model, ids[:, : task.context]) if is_shared else None
            for answers, policy in zip(found, choices, strict=True):
                answers[number] = is_answered(task, answer_question(model, task, ids, policy, context))
                if policy is None and not answers[number]:
                    break
    return found


def answer_question(
    model: nn.Module, task: NeedleTask, ids: Tensor, policy: Policy | None, context: ReadContext | None
) -> Tensor:
    """Return the logits (n, vocabulary) of the tokens of the question and the answer, with a policy."""
    if context is not None and (policy is None or policy.reads_whole_prompt):
        return context.continue_with(ids[:, task.context :], policy)[0]
    with intervene(model, *([] if policy is None else [ApplyPolicy(policy, task.context)])):
        return compute_logits(model, ids)[0, task.context :]


def is_answered(task: NeedleTask, logits: Tensor) -> bool:
    """Return whether the likeliest tokens are those of the answer, from the logits (n, vocabulary) after the context."""
    wanted = torch.tensor(task.tokens[task.answer :], device=logits.device)
    return torch.equal(logits[task.answer - task.context - 1 : -1].argmax(-1), wanted)
