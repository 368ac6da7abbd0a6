"""Policies that evict a key from a full cache at every step: H2O and TOVA.

The cache is replayed step by step in plain form, which is the definition, or by a faster one.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from regard.compiled import processor
from regard.errors import ConfigError
from regard.mechanism.arguments import check_count
from regard.mechanism.mask_algebra import Mask
from regard.mechanism.scores import default_scale, score_dtype
from regard.policies.attention_inputs import CAUSAL, AttentionInputs
from regard.policies.budget import count_keys
from regard.policies.key_masks import Lifetime
from regard.policies.policy import BudgetPolicy, end_at_prompt, require_prompt, select_largest, share_ends

How = Literal["sum", "last"]  # of a key's weights so far, by key head; the last query's alone, in the mean of all heads


@dataclass(frozen=True)
class H2O(BudgetPolicy):
    """Keep the last `recent` keys and those with the largest sum of weights so far, `budget` keys in all.

    The sums start with the whole prompt, after which the cache is cut to the budget; then each query attends to the cache and
    to its own key, its weights are added, and the key with the smallest sum is evicted. Weights are summed over the query heads
    of a key head. recent is half of the budget by default. Source: Zhang et al. 2023 (H2O), algorithm 1.
    """

    recent: int | None = None
    reads_whole_prompt: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
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
class TOVA(BudgetPolicy):
    """Keep the `budget` keys to which the last query attends most, in the mean over all heads of the layer.

    The cache is cut to the budget after the prompt; then each query attends to the cache and to its own key, and the key with
    the smallest weight is evicted, never its own. All heads of a layer keep the same keys. Source: Oren et al. 2024 (TOVA); the
    last key is always kept, as in kvpress.
    """

    reads_whole_prompt: ClassVar[bool] = True

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


def replay_evictions(inputs: AttentionInputs, kept: Tensor, counts: Tensor, recent: Tensor, scores: Tensor, how: How) -> Tensor:
    """Return the end of each key, (b, g, t), if at each step the key with the smallest score is evicted from a full cache.

    After the prompt the cache of each key head holds the kept keys (b, g, prompt) with their scores. counts (g,) is its size,
    recent (g,) the number of the last keys that are never evicted. Raises ConfigError for a bias on the scores.
    """
    if inputs.bias is not None:
        raise ConfigError("H2O and TOVA do not support a bias that is added to the scores, such as ALiBi's.")
    is_plain = inputs.mask == CAUSAL and inputs.softcap is None and inputs.sinks is None
    is_float32 = score_dtype(inputs.q.dtype) == torch.float32 and inputs.q.device.type == "cpu"
    if is_plain and is_float32 and processor.has_numba():
        from regard.policies import numba_eviction

        ends: Tensor = numba_eviction.replay_evictions(inputs, kept, counts, recent, scores, how)  # type: ignore[no-untyped-call]
        return ends
    return replay_plainly(inputs, kept, counts, recent, scores, how)


def replay_plainly(inputs: AttentionInputs, kept: Tensor, counts: Tensor, recent: Tensor, scores: Tensor, how: How) -> Tensor:
    """Return the end of each key as replay_evictions does, by torch, on any device and with any model's scores."""
    cache = EvictionCache(inputs, kept, counts, recent, scores)
    for position in range(inputs.prompt, inputs.tokens):
        weights = cache.append_key(position)
        cache.scores = cache.scores + weights if how == "sum" else weights.mean(1, keepdim=True).repeat(1, kept.shape[1], 1)
        cache.evict_keys(position)
    return cache.ends


class EvictionCache:
    """The cache of a layer as it is filled: its slots, the key in each, and the score by which a key is evicted.

    counts (g,) is the size of each head's cache, recent (g,) how many of the last keys are never evicted. `ends` (b, g, t) is
    the first position that does not see a key.
    """

    def __init__(self, inputs: AttentionInputs, kept: Tensor, counts: Tensor, recent: Tensor, scores: Tensor) -> None:
        self.inputs, self.ends = inputs, end_at_prompt(kept.clone(), inputs)
        b, g, _ = kept.shape
        device, dtype = kept.device, score_dtype(inputs.q.dtype)
        self.counts, self.recent = (x.to(device).view(1, g).expand(b, g) for x in (counts, recent))
        slots = min(int(counts.max()), inputs.tokens) + 1
        self.filled = kept.sum(-1)  # (b, g)
        order = kept.to(torch.uint8).sort(dim=-1, descending=True, stable=True).indices[:, :, :slots]  # kept keys first
        width = order.shape[2]
        self.slots = torch.full((b, g, slots), -1, device=device)  # the key in each slot, -1 for none
        is_filled = torch.arange(width, device=device) < self.filled.unsqueeze(-1)
        self.slots[:, :, :width] = order.masked_fill(~is_filled, -1)
        self.scores = torch.zeros(b, g, slots, dtype=dtype, device=device)
        self.scores[:, :, :width] = scores.gather(2, order).masked_fill(~is_filled, 0)
        self.keys = torch.zeros(b, g, slots, inputs.k.shape[3], dtype=dtype, device=device)
        self.keys[:, :, :width] = inputs.k.to(dtype).gather(2, order.unsqueeze(-1).expand(-1, -1, -1, inputs.k.shape[3]))
        self.free = self.filled.clone()  # the slot of the next key
        self.rows = torch.arange(b, device=device).view(b, 1), torch.arange(g, device=device)

    def append_key(self, position: int) -> Tensor:
        """Store the key at a position and return the weights of its query on each slot, (b, g, slots), averaged by group."""
        inputs, place = self.inputs, (*self.rows, self.free)
        self.slots[place], self.scores[place] = position, 0
        self.keys[place] = inputs.k[:, :, position].to(self.keys.dtype)
        b, g, slots = self.slots.shape
        q = inputs.q[:, :, position].to(self.keys.dtype).view(b, g, -1, inputs.q.shape[3])
        scores = q @ self.keys.mT * (default_scale(inputs.q) if inputs.scale is None else inputs.scale)  # (b, g, r, slots)
        if inputs.softcap is not None:
            scores = (scores / inputs.softcap).tanh() * inputs.softcap
        hidden = self.slots < 0
        if inputs.mask != CAUSAL:
            i = torch.tensor(position, device=hidden.device)
            hidden = hidden | ~inputs.mask.can_see(torch.zeros_like(i), torch.zeros_like(i), i, self.slots.clamp(min=0))
        scores = scores.masked_fill(hidden.unsqueeze(2), -torch.inf)
        if inputs.sinks is not None:
            sinks = inputs.sinks.to(scores).view(1, g, -1, 1).expand(b, -1, -1, 1)
            scores = torch.cat([scores, sinks], -1)
        return scores.softmax(-1)[..., :slots].mean(2)

    def evict_keys(self, position: int) -> None:
        """Evict the key with the smallest score where the cache is over its size; the recent ones stay."""
        stays = (self.slots < 0) | (self.slots > (position - self.recent).unsqueeze(-1))
        victim = self.scores.masked_fill(stays, torch.inf).argmin(-1)  # (b, g)
        is_full = self.filled >= self.counts
        key = self.slots.gather(2, victim.unsqueeze(-1)).squeeze(-1)
        b, g = (x.expand_as(key)[is_full] for x in self.rows)
        self.ends[b, g, key[is_full]] = position + 1
        self.slots[b, g, victim[is_full]] = -1
        self.filled = self.filled + (~is_full).long()
        self.free = torch.where(is_full, victim, self.filled)
