"""Kernels that are right with few tokens and wrong with many: they go block by block."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examination.wrong_masks import Fused


def causal(q: Tensor, k: Tensor) -> Tensor:
    """Which keys stand no later than each query, bool (q, k)."""
    return torch.arange(q.shape[-2])[:, None] >= torch.arange(k.shape[-2])


def online(q: Tensor, k: Tensor, v: Tensor, block: int, rescaled: bool = True) -> Tensor:
    """softmax(q kᵀ / √d) v, causal, a block of keys at a time."""
    seen, top = causal(q, k), q.new_full((*q.shape[:-1], 1), -torch.inf)
    total, context = torch.zeros_like(top), 0.0
    for one in range(0, k.shape[-2], block):
        keys = slice(one, one + block)
        scores = (q @ k[..., keys, :].mT / q.shape[-1] ** 0.5).masked_fill(~seen[:, keys], -torch.inf)
        above = torch.maximum(top, scores.amax(-1, keepdim=True))
        weights, shrunk = (scores - above).exp(), (top - above).exp()
        total = total * shrunk + weights.sum(-1, keepdim=True)
        context = context * (shrunk if rescaled or one == 0 else 1.0) + weights @ v[..., keys, :]
        top = above
    return context / total


def output_not_rescaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return online(q, k, v, 16, rescaled=False)


class OutputNotRescaled(Fused):
    # the running output keeps the old maximum
    def attend(self, q, k, v):
        return online(q, k, v, 16, rescaled=False)


def diagonal_blocks_unmasked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i = torch.arange(q.shape[-2])
    seen = torch.where(i[:, None] < 64, i[:, None] >= i, i[:, None] // 64 >= i // 64)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


def last_block_dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    kept = max(64, k.shape[-2] // 64 * 64)
    k, v = k[..., :kept, :], v[..., :kept, :]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=causal(q, k))


def rotate_halves(x: Tensor, stretched: float = 1.0) -> Tensor:
    """Rotary positions."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[-2])[:, None] / stretched * 100.0 ** -(torch.arange(half) / half)
    a, b = x.chunk(2, -1)
    return torch.cat((a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()), -1)


class LastBlockDropped(Fused):
    # with positions in queries and keys, so that no formula is at hand
    def attend(self, q, k, v):
        return last_block_dropped(rotate_halves(q), rotate_halves(k), v)


class TurnedNotRescaled(Fused):
    # the same with positions
    def attend(self, q, k, v):
        return online(rotate_halves(q), rotate_halves(k), v, 16, rescaled=False)


class EdgeOfBlocks(Fused):
    # <= where < belongs: the last query of each block sees the first key of the next
    def attend(self, q, k, v):
        i = torch.arange(q.shape[-2])
        edge = (i[:, None] % 16 == 15) & (i == i[:, None] + 1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=causal(q, k) | edge)


class MaskInAnAttribute(Fused):
    # a mask of 32 tokens, padded with False, which hides nothing
    def __init__(self) -> None:
        super().__init__()
        self.hidden = torch.ones(32, 32).triu(1).bool()

    def attend(self, q, k, v):
        t = q.shape[-2]
        hidden = F.pad(self.hidden, (0, max(0, t - 32), 0, max(0, t - 32)))[:t, :t]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=~hidden)


class ScaleOfManyTokens(nn.Module):
    # another scale where a long path is taken
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(12, 12) for _ in range(3))

    def forward(self, x):
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        scale = None if x.shape[1] <= 128 else 1 / 12
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
