"""Layers whose heads, roles or sequences are mixed up."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

C, H = 24, 4
D = C // H


def causal(scores: Tensor) -> Tensor:
    return scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)


class ViewedIn(nn.Module):
    # https://github.com/reczoo/FuxiCTR/issues/30
    # https://github.com/649453932/Chinese-Text-Classification-Pytorch/issues/10
    def __init__(self) -> None:
        super().__init__()
        self.fc_Q, self.fc_K, self.fc_V, self.fc = (nn.Linear(C, C) for _ in range(4))

    def forward(self, x):
        b = x.size(0)
        q, k, v = (f(x).view(b * H, -1, D) for f in (self.fc_Q, self.fc_K, self.fc_V))
        weights = F.softmax(causal(torch.matmul(q, k.permute(0, 2, 1)) * D**-0.5), dim=-1)
        return self.fc(torch.matmul(weights, v).view(b, -1, C))


class ViewedOut(nn.Module):
    # https://github.com/jsbaan/transformer-from-scratch/pull/6
    # https://github.com/pytorch/pytorch/issues/67651
    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj, self.o_proj = nn.Linear(C, 3 * C), nn.Linear(C, C)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv_proj(x).reshape(b, t, H, 3 * D).permute(0, 2, 1, 3).chunk(3, dim=-1)
        weights = causal(q @ k.transpose(-2, -1) / math.sqrt(D)).softmax(dim=-1)
        return self.o_proj((weights @ v).reshape(b, t, C))


class ViewedOutBesideResidual(nn.Module):
    # the same in a block: https://github.com/meta-pytorch/opacus/pull/825
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(C), ViewedOut()

    def forward(self, x):
        return x + self.attn(self.norm(x))


class ViewedAcrossBatch(nn.Module):
    # heads first, then a view as if the batch were: https://github.com/hackiey/QAnet-pytorch/issues/2
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Parameter(torch.randn(H, C, D) / C**0.5) for _ in range(3))

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (torch.einsum("btc,hcd->hbtd", x, w) for w in (self.query, self.key, self.value))
        return (causal(q @ k.mT / D**0.5).softmax(-1) @ v).contiguous().view(b, t, H * D)


class HeadsBeforeBatch(nn.Module):
    # https://github.com/gazelle93/Transformer-Various-Positional-Encoding/issues/1
    def __init__(self) -> None:
        super().__init__()
        self.q_linear, self.k_linear, self.v_linear, self.out = (nn.Linear(C, C) for _ in range(4))

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (f(x).view(b, t, H, D).transpose(1, 2).flatten(0, 1) for f in (self.q_linear, self.k_linear, self.v_linear))
        context = torch.bmm(torch.softmax(causal(torch.bmm(q, k.mT) / math.sqrt(D)), -1), v)  # (b h, t, d)
        return self.out(context.view(H, b, t, D).permute(1, 2, 0, 3).reshape(b, t, C))


class Grouped(nn.Module):
    """Two heads of keys for four of queries."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wo = nn.Linear(C, C, bias=False), nn.Linear(C, C, bias=False)
        self.wk, self.wv = nn.Linear(C, 2 * D, bias=False), nn.Linear(C, 2 * D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = self.wq(x).view(b, t, H, D).transpose(1, 2)
        k, v = (self.repeat(f(x).view(b, t, 2, D).transpose(1, 2)) for f in (self.wk, self.wv))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).flatten(2))

    def repeat(self, k: Tensor) -> Tensor:
        raise NotImplementedError


class Tiled(Grouped):
    # https://github.com/ekzhang/jax-js/pull/180
    def repeat(self, k):
        return k.repeat(1, H // 2, 1, 1)


class FirstGroupOnly(Grouped):
    # every head reads the first one's keys: https://github.com/PSAL-POSTECH/ONNXim/pull/34
    # https://github.com/BobMcDear/attorch/issues/14
    def repeat(self, k):
        return k[:, [0, 0, 0, 0]]


class HeadsAsTokens(nn.Module):
    # attention among the heads of each token: the transpose before the scores is missing
    # https://github.com/NVIDIA/apex/issues/1131 asks what the slices of such a view are
    def __init__(self) -> None:
        super().__init__()
        self.W_q, self.W_k, self.W_v, self.W_o = (nn.Linear(C, C) for _ in range(4))

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (H, D)) for f in (self.W_q, self.W_k, self.W_v))  # (b, t, h, d)
        return self.W_o((torch.softmax(q @ k.transpose(-2, -1) / D**0.5, dim=-1) @ v).flatten(2))


class BatchLast(nn.Module):
    # batch_first=True forgotten: https://github.com/om-ai-lab/OmDet/issues/19
    # https://github.com/aipixel/AEMatter/issues/3
    def __init__(self) -> None:
        super().__init__()
        self.mha = nn.MultiheadAttention(C, H)

    def forward(self, x):
        return self.mha(x, x, x)[0]


class BatchViewed(nn.Module):
    # view where a transpose belongs: https://github.com/rish-16/tokenlearner-pytorch/issues/1
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(C, H, dim_feedforward=2 * C, dropout=0.0)

    def forward(self, x):
        b, t, c = x.shape
        return self.layer(x.reshape(t, b, c)).reshape(b, t, c)


class Named(nn.Module):
    """One head in nn.Parameters; `mix` is each class's own."""

    def __init__(self) -> None:
        super().__init__()
        self.W_query, self.W_key, self.W_value = (nn.Parameter(torch.rand(14, 6)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x @ self.W_query, x @ self.W_key, x @ self.W_value)

    def mix(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        raise NotImplementedError


class Exchanged(Named):
    # K Qᵀ where Q Kᵀ belongs: https://github.com/karpathy/llm.c/pull/531 suspected it of itself
    def mix(self, queries, keys, values):
        return torch.softmax(causal(keys @ queries.transpose(-2, -1) / 6**0.5), dim=-1) @ values


class KeysAsValues(Named):
    # https://github.com/fchollet/deep-learning-with-python-notebooks/issues/261
    def mix(self, queries, keys, values):
        return torch.softmax(causal(queries @ keys.transpose(-2, -1) / 6**0.5), dim=-1) @ keys


class ValueOfKeys(nn.Module):
    # the key's projection for the value: https://github.com/yflyzhang/AnnotatedTransformer/issues/1
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(C, C) for _ in range(4))

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (f(x).view(b, t, H, D).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.k_proj))
        weights = causal(q @ k.transpose(-2, -1) / math.sqrt(D)).softmax(-1)
        return self.out_proj((weights @ v).transpose(1, 2).reshape(b, t, C))


class QueryUnprojected(nn.Module):
    # the projections of query and value are there and not called:
    # https://github.com/Khaliladib11/Transformer-from-scratch/issues/1
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(14, 14) for _ in range(3))

    def forward(self, x):
        scores = x @ self.key(x).transpose(1, 2) / math.sqrt(14)
        return causal(scores).softmax(-1) @ self.value(x)


class WeightsTurned(Named):
    # weightsᵀ v: the einsum's letters exchanged
    def mix(self, queries, keys, values):
        weights = torch.softmax(torch.einsum("bid,bjd->bij", queries, keys) / 6**0.5, dim=-1)
        return torch.einsum("bij,bid->bjd", weights, values)
