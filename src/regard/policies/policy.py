"""Policy: a frozen value that says which keys each query may use; PromptPolicy: one that scores the keys of the prompt once.

check_causality refuses a policy that looks ahead, whoever wrote it.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Self, dataclass_transform

import torch
from torch import Tensor

from regard.errors import ConfigError, ShapeError
from regard.mechanism.arguments import describe_value
from regard.mechanism.heads import share
from regard.mechanism.mask_algebra import NEVER, Mask
from regard.policies.attention_inputs import AttentionInputs
from regard.policies.budget import Budget, check_budget, count_keys
from regard.policies.key_masks import Lifetime

BLOCK = 256  # queries whose tables are compared at a time


def make_dataclass(policy: type) -> None:
    """Make a subclass of Policy a frozen dataclass, unless it is one or has a constructor of its own."""
    if issubclass(policy, Policy) and not {"__dataclass_fields__", "__init__"} & vars(policy).keys():
        dataclass(frozen=True)(policy)


@dataclass_transform(frozen_default=True)
@dataclass(frozen=True)
class Policy(ABC):
    """Which keys each query may use, decided from the queries, keys and values of a layer.

    A subclass is a frozen dataclass with `choose_keys`, with or without the decorator: its annotations are its parameters. The
    prompt is read at once, so that what its queries use may depend on all of it; what a later query uses depends on no token
    after its own. `check_causality` tests that. A subclass whose queries of the prompt always read all keys before them sets
    `reads_whole_prompt`: many policies can then share one reading of it.
    """

    reads_whole_prompt: ClassVar[bool] = False

    def __new__(cls, *arguments: object, **named: object) -> Self:
        make_dataclass(cls)
        return super().__new__(cls)

    def __init_subclass__(cls) -> None:
        for parent in cls.__bases__:
            make_dataclass(parent)

    @abstractmethod
    def choose_keys(self, inputs: AttentionInputs) -> Mask:
        """Return the mask of the keys that each query may use; the model's own mask is applied as well."""

    def change_cache(self, inputs: AttentionInputs) -> tuple[Tensor, Tensor] | None:
        """Return the keys and values, (b, g, t, d) and (b, g, t, e), that queries after the prompt read; None if unchanged."""
        return None

    @property
    def label(self) -> str:
        """The policy as it is written, with its budget and what differs from the defaults, long tuples by their ends."""
        arguments = {one.name: (getattr(self, one.name), one.default) for one in fields(self)}
        shown = [
            f"{name}={format_argument(value)}"
            for name, (value, default) in arguments.items()
            if value != default or (name == "budget" and value is not None)
        ]
        return f"{type(self).__name__}({', '.join(shown)})"


LONGEST_ARGUMENT = 24  # characters of an argument in a label


def format_argument(value: object) -> str:
    """Return an argument as text: a long tuple by its first and last entries, anything else that is long as dots."""
    text = repr(value)
    if len(text) < LONGEST_ARGUMENT:
        return text
    if not isinstance(value, tuple):
        return f"{value:.3g}" if isinstance(value, float) else "..."
    first, last = (f"{one:.3g}" if isinstance(one, float) else format_argument(one) for one in (value[0], value[-1]))
    return f"({first}, ..., {last})"


def label_policies(policies: Sequence[Policy]) -> tuple[str, ...]:
    """Return the labels of policies, those that stand several times with a number after the first of them."""
    labels = [policy.label for policy in policies]
    places = [labels[:n].count(label) + 1 for n, label in enumerate(labels)]
    return tuple(label if place == 1 else f"{label} #{place}" for label, place in zip(labels, places, strict=True))


@dataclass(frozen=True)
class BudgetPolicy(Policy):
    """A policy with a budget: a number of keys, a share of the prompt, or a tuple of these by layer, and by key head."""

    budget: Budget = 0.1

    def __post_init__(self) -> None:
        object.__setattr__(self, "budget", check_budget(f"{type(self).__name__}(budget)", self.budget))


@dataclass(frozen=True)
class PromptPolicy(BudgetPolicy):
    """A policy that keeps, once the prompt is read, its best keys of it; all later keys stay.

    A subclass writes `score_keys`, which sees the prompt alone. The budget counts the kept keys of the prompt. At each query of
    the prompt every key is used.
    """

    reads_whole_prompt: ClassVar[bool] = True

    @abstractmethod
    def score_keys(self, prompt: AttentionInputs) -> Tensor:
        """Return the score of each key of the prompt, (b, g, k): the keys with the largest are kept."""

    def choose_keys(self, inputs: AttentionInputs) -> Mask:
        require_prompt(self, inputs, 1)
        scores = self.score_keys(inputs.select_prompt())
        b, g, _, _ = inputs.k.shape
        if not isinstance(scores, Tensor) or scores.shape != (b, g, inputs.prompt) or scores.isnan().any():
            came = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
            raise ShapeError(
                f"{type(self).__name__}.score_keys must return a number for each key of the prompt, (b, g, k) = "
                f"({b}, {g}, {inputs.prompt}), and no NaN; got {came}."
            )
        kept = select_largest(scores, count_keys(self.budget, inputs.prompt, inputs.layer, g))
        return Lifetime(share_ends(end_at_prompt(kept, inputs), inputs))


def check_policy(value: object) -> Policy:
    """Return a policy, or raise ConfigError for anything else."""
    if not isinstance(value, Policy):
        raise ConfigError(f"a policy must be a Policy, such as regard.policies.Knorm(0.1); got {describe_value(value)}.")
    return value


def require_prompt(policy: Policy, inputs: AttentionInputs, least: int, or_else: str = "") -> None:
    """Raise ConfigError, which ends with other advice, for fewer tokens than a policy needs, or more than there are."""
    came = f"got {inputs.prompt:,} of {inputs.tokens:,} tokens"
    if inputs.prompt > inputs.tokens:
        raise ConfigError(f"a prompt cannot have more tokens than there are; {came}.")
    if inputs.prompt < least:
        longer = "a longer prompt" if least <= inputs.tokens else "a prompt of a longer text"
        raise ConfigError(f"{policy.label} needs a prompt of at least {least:,} tokens; {came}. Pass {longer}{or_else}.")


def select_largest(scores: Tensor, counts: Tensor) -> Tensor:
    """Return which of the scores (b, g, k) are among the counts[g] largest of their head, as a bool (b, g, k)."""
    most = min(int(counts.max()), scores.shape[2])
    places = scores.topk(most).indices
    chosen = torch.arange(most, device=scores.device) < counts.to(scores.device).view(1, -1, 1)
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(2, places, chosen.expand_as(places))


def end_at_prompt(kept: Tensor, inputs: AttentionInputs) -> Tensor:
    """Return the ends of all keys, (b, g, t): those of the prompt that are not kept end with it, the others never."""
    ends = torch.full((*kept.shape[:2], inputs.tokens), NEVER, device=kept.device)
    ends[:, :, : kept.shape[2]][~kept] = kept.shape[2]
    return ends


def share_ends(ends: Tensor, inputs: AttentionInputs) -> Tensor:
    """Repeat the ends of key heads (b, g, t) for the query heads, (b, h, t)."""
    return share(ends.unsqueeze(-1), inputs.q.shape[1]).squeeze(-1)


def check_causality(policy: Policy, inputs: AttentionInputs, cut: int, seed: int = 0) -> None:
    """Raise ConfigError if what the queries before `cut` use depends on the tokens from `cut` on.

    The queries, keys and values of those tokens are drawn at random, and the policy chooses again. cut must be at least the
    length of the prompt: what a query of the prompt uses may depend on all of the prompt.
    """
    if not inputs.prompt <= cut < inputs.tokens:
        raise ConfigError(
            f"cut must be at least the prompt's {inputs.prompt:,} tokens and below all {inputs.tokens:,}; got {cut:,}."
        )
    generator = torch.Generator().manual_seed(seed)

    def draw_end(x: Tensor) -> Tensor:
        return torch.cat([x[:, :, :cut], torch.randn(x[:, :, cut:].shape, generator=generator).to(x)], 2)

    v = None if inputs.v is None else draw_end(inputs.v)
    drawn_inputs = replace(inputs, q=draw_end(inputs.q), k=draw_end(inputs.k), v=v)
    caches = [policy.change_cache(one) for one in (inputs, drawn_inputs)]
    pairs = zip(*(cache or () for cache in caches), strict=True)
    if not all(torch.equal(x[:, :, :cut], y[:, :, :cut]) for x, y in pairs):
        raise ConfigError(f"{policy.label} looks ahead: keys or values before {cut:,} changed with later tokens.")
    ours, theirs = (policy.choose_keys(one) for one in (inputs, drawn_inputs))
    keys = torch.arange(cut, device=inputs.k.device)
    for queries in keys.split(BLOCK):
        tables = [mask.block(queries, keys) & inputs.mask.block(queries, keys) for mask in (ours, theirs)]
        different = (tables[0] != tables[1]).flatten(0, 1).any(0).any(-1)
        if different.any():
            query = int(queries[different][0])
            raise ConfigError(
                f"{policy.label} looks ahead: the keys that query {query:,} uses changed with tokens from {cut:,} on. What a "
                "query uses may depend on the tokens up to its own, and within the prompt on all of the prompt."
            )
