"""check_causality: a policy that looks ahead is refused, whoever wrote it."""

from dataclasses import replace

import torch
from torch import Tensor

from regard.errors import ConfigError
from regard.policies.attention_inputs import AttentionInputs
from regard.policies.policy import Policy

BLOCK = 256  # queries whose tables are compared at a time


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
