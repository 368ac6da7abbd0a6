"""Policies that evict a key from a full cache at every step: H2O and TOVA."""

from dataclasses import dataclass

import torch

from regard.errors import ConfigError
from regard.mechanism.arguments import check_count
from regard.mechanism.mask_algebra import Mask
from regard.policies.attention_inputs import AttentionInputs
from regard.policies.budget import Budget, check_budget, count_keys
from regard.policies.cache_replay import replay_evictions
from regard.policies.key_masks import Lifetime
from regard.policies.policy import Policy, require_prompt, select_largest, share_ends


@dataclass(frozen=True)
class H2O(Policy):
    """Keep the last `recent` keys and those with the largest sum of weights so far, `budget` keys in all.

    The sums start with the whole prompt, after which the cache is cut to the budget; then each query attends to the cache and
    to its own key, its weights are added, and the key with the smallest sum is evicted. Weights are summed over the query heads
    of a key head. recent is half of the budget by default. Source: Zhang et al. 2023 (H2O), algorithm 1.
    """

    budget: Budget = 0.1
    recent: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "budget", check_budget("H2O(budget)", self.budget))
        if self.recent is not None:
            check_count("H2O(recent)", self.recent, 0)

    def choose_keys(self, inputs: AttentionInputs) -> Mask:
        require_prompt(self, inputs, 1)
        counts = count_keys(self.budget, inputs.prompt, inputs.layer, inputs.k.shape[1])
        recent = counts // 2 if self.recent is None else torch.full_like(counts, self.recent)
        if bool((recent >= counts).any()):
            raise ConfigError(
                f"{self.label} keeps the last {int(recent.max()):,} keys, which must be fewer than its budget of "
                f"{int(counts.min()):,}: pass a larger budget or a smaller recent."
            )
        sums = inputs.average_group(inputs.sum_weights())  # (b, g, k)
        first = (inputs.prompt - recent).clamp(min=0).to(sums.device)  # of the recent keys
        is_recent = torch.arange(inputs.prompt, device=sums.device) >= first.view(1, -1, 1)
        kept = select_largest(sums.masked_fill(is_recent, torch.inf), counts)
        return Lifetime(share_ends(replay_evictions(inputs, kept, counts, recent, sums, "sum"), inputs))


@dataclass(frozen=True)
class TOVA(Policy):
    """Keep the `budget` keys to which the last query attends most, in the mean over all heads of the layer.

    The cache is cut to the budget after the prompt; then each query attends to the cache and to its own key, and the key with
    the smallest weight is evicted, never its own. All heads of a layer keep the same keys. Source: Oren et al. 2024 (TOVA); the
    last key is always kept, as in kvpress.
    """

    budget: Budget = 0.1

    def __post_init__(self) -> None:
        object.__setattr__(self, "budget", check_budget("TOVA(budget)", self.budget))

    def choose_keys(self, inputs: AttentionInputs) -> Mask:
        require_prompt(self, inputs, 1)
        g = inputs.k.shape[1]
        counts = count_keys(self.budget, inputs.prompt, inputs.layer, g)
        if len(set(counts.tolist())) > 1:
            raise ConfigError("TOVA keeps the same keys in all heads of a layer: pass one budget for each layer.")
        prompt = inputs.select_prompt()
        weights = prompt.build_map(inputs.prompt - 1)[:, :, 0].mean(1, keepdim=True)  # (b, 1, k)
        weights[:, :, -1] = torch.inf
        kept = select_largest(weights, counts[:1]).expand(-1, g, -1)
        ends = replay_evictions(inputs, kept, counts, torch.ones_like(counts), weights.expand(-1, g, -1), "last")
        return Lifetime(share_ends(ends, inputs))
