"""What a policy does to the model's predictions: the loss, the next-token distributions, and whether a needle is found."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.errors import ConfigError, ShapeError
from regard.mechanism.arguments import check_count, check_sequence, describe_value
from regard.observe.intervene import intervene
from regard.policies import Policy
from regard.policy_audit.apply_policy import ApplyPolicy
from regard.policy_audit.audit import Watch
from regard.policy_audit.needle_tasks import NeedleTask
from regard.probe.evaluation_mode import evaluate_mode
from regard.probe.retrieval import read_logits

ROWS = 256  # of logits that are compared at a time


@dataclass(frozen=True)
class Downstream:
    """What a policy does to the predictions after the prompt, all in nats: loss, its change, and KL(complete || policy).

    agreement is the share of predictions whose likeliest token stays the same.
    """

    policy: str
    loss: float
    change: float
    kl: float
    agreement: float

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return asdict(self)


def measure_downstream(
    model: nn.Module,
    tokens: Tensor,
    policies: Sequence[Policy],
    *,
    prompt: int,
    watch: Watch = lambda policies, count: policies,
) -> list[Downstream]:
    """Run a causal language model on tokens (b, t) with each policy, and compare its predictions after the prompt.

    One forward for each policy, by ApplyPolicy. Raises ConfigError and ShapeError.
    """
    if not isinstance(tokens, Tensor) or tokens.dim() != 2 or tokens.is_floating_point():
        raise ShapeError(f"tokens must be whole numbers (b, t), got {describe_value(tokens)}.")
    check_count("prompt", prompt, 1, tokens.shape[1] - 2)
    found = []
    with evaluate_mode(model), torch.no_grad():
        complete = read_logits(model(tokens))[:, prompt:-1]
        before = compute_loss(complete, tokens[:, prompt + 1 :])
        for policy in watch(check_sequence("policies", policies), len(policies)):
            with intervene(model, ApplyPolicy(policy, prompt)):
                logits = read_logits(model(tokens))[:, prompt:-1]
            loss = compute_loss(logits, tokens[:, prompt + 1 :])
            found.append(Downstream(policy.label, loss, loss - before, *compare_logits(complete, logits)))
    return found


def compute_loss(logits: Tensor, targets: Tensor) -> float:
    """Compute the mean cross-entropy of logits (b, t, n), nats."""
    parts = zip(logits.split(ROWS, 1), targets.split(ROWS, 1), strict=True)
    losses = [F.cross_entropy(x.flatten(0, 1).float(), y.flatten(), reduction="sum") for x, y in parts]
    return float(torch.stack(losses).double().sum()) / targets.numel()


def compare_logits(complete: Tensor, changed: Tensor) -> tuple[float, float]:
    """Return the mean KL(complete || changed) of the distributions, nats, and how often their likeliest token is the same."""
    divergence, same = 0.0, 0
    for x, y in zip(complete.split(ROWS, 1), changed.split(ROWS, 1), strict=True):
        ours, theirs = (one.flatten(0, 1).float().log_softmax(-1) for one in (x, y))
        divergence += float(F.kl_div(theirs, ours, reduction="sum", log_target=True))
        same += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
    rows = complete.shape[0] * complete.shape[1]
    return divergence / rows, same / rows


def find_needles(
    model: nn.Module,
    tasks: Sequence[NeedleTask],
    policy: Policy | None,
    watch: Watch = lambda tasks, count: tasks,
) -> list[bool]:
    """Return for each task whether the greedy answer of the model is right, with a policy or, with None, without one.

    The policy compresses the context before the question is read. An answer is right if each of its tokens is the likeliest
    after those before it, which is what greedy decoding writes: one forward for each task. Raises ConfigError without tasks.
    """
    if not check_sequence("tasks", tasks):
        raise ConfigError("there are no tasks: pass those of make_needle_tasks.")
    device = next(model.parameters()).device
    found = []
    with evaluate_mode(model), torch.no_grad():
        for task in watch(tasks, len(tasks)):
            ids = torch.tensor([task.tokens], device=device)
            changes = [] if policy is None else [ApplyPolicy(policy, task.context)]
            with intervene(model, *changes):
                logits = read_logits(model(ids))[0]
            wanted = slice(task.answer, len(task.tokens))
            found.append(bool((logits[task.answer - 1 : -1].argmax(-1) == ids[0, wanted]).all()))
    return found
