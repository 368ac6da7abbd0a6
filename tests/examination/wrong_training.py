"""Layers that go wrong in training or in evaluation: dropout, and gradients that do not arrive."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

C, H, P = 24, 4, 0.2
D = C // H


class Heads(nn.Module):
    """Causal attention of several heads; what happens to the scores and the weights is each class's own."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(C, C) for _ in range(3))
        self.dense = nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (H, D)).transpose(1, 2) for f in (self.query, self.key, self.value))
        return self.dense(self.attend(q, k, v).transpose(1, 2).flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = self.process_scores(q @ k.mT / math.sqrt(D))
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
        return self.process_weights(scores.softmax(-1)) @ v

    def process_scores(self, scores: Tensor) -> Tensor:
        return scores

    def process_weights(self, weights: Tensor) -> Tensor:
        return weights


class DropsAlways(Heads):
    # F.dropout without training=: https://github.com/rixwew/pytorch-fm/issues/21
    # https://github.com/BogiHsu/Tacotron2-PyTorch/issues/8
    def process_weights(self, weights):
        return F.dropout(weights, p=P)


class KernelDropsAlways(Heads):
    # https://github.com/pytorch/pytorch/issues/124464
    # https://github.com/huggingface/pytorch-image-models/pull/1978
    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, dropout_p=P, is_causal=True)


class NotRescaled(Heads):
    # zeros by hand, and nothing divided by 1 - p: https://github.com/rasbt/LLMs-from-scratch/issues/431 explains by what
    def process_weights(self, weights):
        return weights * (torch.rand_like(weights) > P) if self.training else weights


class RescaledByDropped(Heads):
    # divided by p, where 1 - p belongs: https://github.com/NVIDIA/apex/pull/816
    def process_weights(self, weights):
        return weights * (torch.rand_like(weights) > P) / P if self.training else weights


class RescaledInEvaluation(Heads):
    # as dropout was before it was inverted, with p for 1 - p: https://github.com/scut-mingqinchen/Self2Self/issues/7
    def process_weights(self, weights):
        return weights * (torch.rand_like(weights) > P) if self.training else weights * P


class ScoresDropped(Heads):
    # before the softmax, where 0 is a score like any: https://github.com/PaddlePaddle/Parakeet/pull/74, taken back in
    # https://github.com/PaddlePaddle/Parakeet/pull/75
    def process_scores(self, scores):
        return F.dropout(scores, P, self.training)


class Detached(Heads):
    # https://github.com/bboylyg/NAD/issues/8
    def process_weights(self, weights):
        return weights.detach()


class WithoutGradient(Heads):
    # https://github.com/LunaBlack/KGAT-pytorch/issues/15
    @torch.no_grad()
    def attend(self, q, k, v):
        return super().attend(q, k, v)


class WeightData(Heads):
    # the numbers of a weight and not the weight: https://github.com/jadore801120/attention-is-all-you-need-pytorch/issues/16
    def forward(self, x):
        q = F.linear(x, self.query.weight.data, self.query.bias.data)
        q, k, v = (one.unflatten(-1, (H, D)).transpose(1, 2) for one in (q, self.key(x), self.value(x)))
        return self.dense(self.attend(q, k, v).transpose(1, 2).flatten(2))


class OneHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(C, D, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(-2, -1) * D**-0.5
        return scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf).softmax(-1) @ self.value(x)


class HeadsInAList(nn.Module):
    # a list is no nn.ModuleList: https://github.com/pytorch/pytorch/issues/715
    # https://github.com/shenwzh3/RGAT-ABSA/issues/9
    def __init__(self) -> None:
        super().__init__()
        self.heads = [OneHead() for _ in range(H)]
        self.proj = nn.Linear(C, C)

    def forward(self, x):
        return self.proj(torch.cat([head(x) for head in self.heads], dim=-1))


class OutputUnused(Heads):
    # a layer that is made and never called: https://github.com/INK-USC/RE-Net/issues/6
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(C, C)


class GradientOfNothing(nn.Module):
    # NaN rows set to 0 afterwards have a gradient of NaN: https://github.com/pytorch/pytorch/issues/41508
    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(C, C, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (H, D)).transpose(1, 2) for f in (self.to_q, self.to_k, self.to_v))
        real = torch.arange(x.shape[1]) < torch.tensor([3, 6])[:, None]
        table = torch.where(real[:, None, :, None] & real[:, None, None, :], 0.0, -torch.inf)
        weights = torch.nan_to_num((q @ k.mT * D**-0.5 + table).softmax(-1))
        return self.to_out((weights @ v).transpose(1, 2).flatten(2))
