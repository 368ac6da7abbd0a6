"""Attention and policies in plain Python on float64 lists of heads: what the policies are compared with."""

import torch

from regard.policies import AttentionInputs

B, G, R, T, P, D, E = 2, 2, 3, 53, 31, 7, 5  # batch rows, key heads, query heads of each, tokens, prompt, widths


def make_inputs(seed=0, tokens=T, prompt=P, dtype=torch.float64, **settings):
    generator = torch.Generator().manual_seed(seed)

    def draw(heads, width):
        return torch.randn(B, heads, tokens, width, generator=generator, dtype=dtype)

    return AttentionInputs(q=draw(G * R, D), k=draw(G, D), v=draw(G, E), prompt=prompt, **settings)


def weigh(q, keys, scale=D**-0.5):
    """The weights of one query (d,) on keys (n, d)."""
    return torch.softmax(keys @ q * scale, 0)


def dense_weights(inputs):
    """All weights (b, h, t, t), written out."""
    k = inputs.k.repeat_interleave(inputs.heads_per_key, 1)
    scores = inputs.q @ k.mT * D**-0.5
    ahead = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(ahead, -torch.inf).softmax(-1)


def table(policy, inputs):
    """Which keys each query uses, (b, h, t, t), the causal mask included."""
    t = torch.arange(inputs.tokens)
    found = policy.choose_keys(inputs).block(t, t) & inputs.mask.block(t, t)
    return found.expand(len(inputs.q), inputs.q.shape[1], -1, -1)


def list_keys_after_prompt(policy, inputs):
    """The keys of the prompt that the first query after it uses, as sets by batch row and head."""
    row = table(policy, inputs)[:, :, inputs.prompt, : inputs.prompt]
    return [[set(head.nonzero().flatten().tolist()) for head in one] for one in row]


def best(scores, n):
    """The places of the n largest of some numbers."""
    return set(sorted(range(len(scores)), key=lambda j: -scores[j])[:n])
