"""What a policy does to a model: its residual stream, its loss and its next-token distributions."""

import functools
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.errors import ShapeError
from regard.evaluation_mode import evaluate_mode
from regard.generate.sequence_reader import compute_logits
from regard.mechanism.arguments import check_count, describe_value
from regard.observe.attention_changes import Change
from regard.observe.intervene import intervene
from regard.observe.recorded_runs.block_outputs import watch_blocks
from regard.observe.recorded_runs.part_names import is_inside
from regard.policies import Policy
from regard.policies.parse_policy import Policies, list_policies
from regard.policy_audit.apply_policy import ApplyPolicy
from regard.policy_audit.audit import Watch

ROWS = 256  # of logits that are compared at a time
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Downstream:
    """What a policy does to the predictions after the prompt, all in nats: loss, its change, and KL(complete || policy).

    agreement is the share of predictions whose likeliest token stays the same. residual is the error `|x' - x| / |x|` of the
    residual stream after each block, in the mean over the queries after the prompt; () if no blocks were found.
    """

    policy: str
    loss: float
    change: float
    kl: float
    agreement: float
    residual: tuple[float, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return asdict(self)


def measure_downstream(
    model: nn.Module,
    tokens: Tensor,
    policies: Policies,
    *,
    prompt: int,
    watch: Watch = lambda policies, count: policies,
) -> list[Downstream]:
    """Run a causal language model on tokens (b, t) with each policy, and compare what it computes after the prompt.

    policies are values of regard.policies, or text as regard.policies.parse_policy takes it. One forward for each policy, by
    ApplyPolicy. Blocks are the modules in a list of modules that return (b, t, c). Raises ConfigError and ShapeError.
    """
    if not isinstance(tokens, Tensor) or tokens.dim() != 2 or tokens.is_floating_point():
        raise ShapeError(f"tokens must be whole numbers (b, t), got {describe_value(tokens)}.")
    check_count("prompt", prompt, 1, tokens.shape[1] - 2)
    chosen = list_policies(policies)
    complete = CompleteRun.compute(model, tokens, prompt)
    return [complete.compare(policy) for policy in watch(chosen, len(chosen))]


@dataclass(frozen=True, eq=False)
class CompleteRun:
    """What a model computes after the prompt without a policy, which every run with one is compared with.

    logits (b, n, vocabulary) are those that predict a token, streams the outputs (b, n, c) of the blocks by path.
    """

    model: nn.Module
    tokens: Tensor
    prompt: int
    logits: Tensor
    streams: dict[str, Tensor]
    loss: float

    @classmethod
    def compute(cls, model: nn.Module, tokens: Tensor, prompt: int) -> "CompleteRun":
        """Run a model on tokens (b, t), of which the first ones are the prompt."""
        logits, streams = run_model(model, tokens, prompt, lambda name, x: x.clone())
        return cls(model, tokens, prompt, logits.clone(), streams, compute_loss(logits, tokens[:, prompt + 1 :]))

    def compare(self, policy: Policy) -> Downstream:
        """Run the model with a policy and compare what it computes."""
        compare = functools.partial(compute_stream_error, self.streams)
        logits, errors = run_model(self.model, self.tokens, self.prompt, compare, ApplyPolicy(policy, self.prompt))
        loss = compute_loss(logits, self.tokens[:, self.prompt + 1 :])
        changes = compare_logits(self.logits, logits)
        return Downstream(policy.label, loss, loss - self.loss, *changes, tuple(errors.values()))


def run_model(
    model: nn.Module, tokens: Tensor, prompt: int, read: Callable[[str, Tensor], Answer], *changes: Change
) -> tuple[Tensor, dict[str, Answer]]:
    """Run a model with changes; return its logits after the prompt, and what `read` returns of each block's output there.

    read takes the path of the block and its output (b, t, c). A module within a block is none.
    """
    modules, found = dict(model.named_modules()), dict[str, Answer]()
    blocks = [name for name in modules if name.rpartition(".")[2].isdigit()]
    outermost = {name: modules[name] for name in blocks if not any(is_inside(name, one) for one in blocks if one != name)}

    def read_block(name: str, x: Tensor, given: Tensor | None) -> None:
        if x.shape[:2] == tokens.shape:
            found[name] = read(name, x[:, prompt:-1])

    with evaluate_mode(model), torch.no_grad(), intervene(model, *changes), watch_blocks(outermost, read_block):
        logits = compute_logits(model, tokens)[:, prompt:-1]
    return logits, found


def compute_stream_error(streams: dict[str, Tensor], name: str, changed: Tensor) -> float:
    """Compute |x' - x| / |x| of the residual stream after a block, in the mean over its rows."""
    errors = (changed - streams[name]).norm(dim=-1) / streams[name].norm(dim=-1)
    return float(errors.double().mean())


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
