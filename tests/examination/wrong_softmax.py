"""Layers whose scores become weights in the wrong way: scale, axis, sum, numbers that overflow."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

C, H = 24, 4
D = C // H


class Heads(nn.Module):
    """Causal attention of several heads in separate projections; `scaled` and `normal` are each class's own."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(C, C) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.size()
        q, k, v = (f(x).view(b, t, H, D).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        scores = self.scale_scores(torch.matmul(q, k.transpose(-2, -1)))
        scores = scores.masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), self.get_hidden_score())
        context = self.normal(scores) @ v
        return self.o_proj(context.transpose(1, 2).contiguous().view(b, t, C))

    def get_hidden_score(self) -> float:
        return -torch.inf

    def scale_scores(self, scores: Tensor) -> Tensor:
        return scores / math.sqrt(D)

    def normal(self, scores: Tensor) -> Tensor:
        return F.softmax(scores, dim=-1)


class Unscaled(Heads):
    # https://github.com/mlc-ai/mlc-llm/pull/3426
    # https://github.com/delzac/cntkx/issues/10
    def scale_scores(self, scores):
        return scores


class StackedScaledByModel(nn.Module):
    """Single heads in a list and a projection over them, as a well-known lecture has them."""

    # https://github.com/karpathy/ng-video-lecture/pull/6
    def __init__(self) -> None:
        super().__init__()
        self.heads, self.proj = nn.ModuleList(HeadScaledByModel() for _ in range(H)), nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(torch.cat([head(x) for head in self.heads], -1))


class HeadScaledByModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(C, D, bias=False) for _ in range(3))
        self.register_buffer("tril", torch.ones(9, 9).tril())

    def forward(self, x: Tensor) -> Tensor:
        t = x.shape[1]
        weights = self.query(x) @ self.key(x).transpose(-2, -1) * C**-0.5
        return weights.masked_fill(self.tril[:t, :t] == 0, -torch.inf).softmax(-1) @ self.value(x)


class ScaledByModel(Heads):
    # √ of the whole width: https://github.com/lucidrains/vit-pytorch/issues/65
    # https://github.com/FrancescoSaverioZuppichini/ViT/issues/1
    def scale_scores(self, scores):
        return scores * C**-0.5


class ScaledByWidth(Heads):
    # by d, not √d: https://github.com/duoan/TorchCode/issues/17
    def scale_scores(self, scores):
        return scores / D


class ScaleTurned(Heads):
    # divided by what was to be multiplied: https://github.com/esceptico/perceiver-io/issues/9
    def scale_scores(self, scores):
        return scores / D**-0.5


class ScaleHardcoded(Heads):
    # the √d of another width: https://github.com/BobMcDear/attorch/issues/14
    # https://github.com/lucidrains/muse-maskgit-pytorch/issues/40
    def scale_scores(self, scores):
        return scores / 8


class ScaledTwice(nn.Module):
    # F.scaled_dot_product_attention scales already: https://github.com/policy-gradient/GRPO-Zero/issues/10
    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(C, 3 * C), nn.Linear(C, C)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (one.view(b, t, H, D).transpose(1, 2) for one in self.c_attn(x).split(C, dim=2))
        y = F.scaled_dot_product_attention(q / math.sqrt(D), k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))


class HeadOfLecture(nn.Module):
    # one head, scaled by the width of what comes in: https://github.com/karpathy/ng-video-lecture/pull/6
    # https://github.com/Graylab/DL4Proteins-notebooks/issues/12
    def __init__(self) -> None:
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(C, 6, bias=False) for _ in range(3))
        self.register_buffer("tril", torch.tril(torch.ones(16, 16)))

    def forward(self, x):
        _, t, c = x.shape
        wei = self.query(x) @ self.key(x).transpose(-2, -1) * c**-0.5
        wei = F.softmax(wei.masked_fill(self.tril[:t, :t] == 0, float("-inf")), dim=-1)
        return wei @ self.value(x)


def scaled_by_tokens(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    # the second axis is no longer the width once there are heads: https://github.com/jadore801120/attention-is-all-you-need-pytorch/issues/177
    scores = q @ k.mT / math.sqrt(k.size(2))
    return scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf).softmax(-1) @ v


class OverQueries(nn.Module):
    # https://github.com/labmlai/annotated_deep_learning_paper_implementations/issues/146
    # https://github.com/nerminnuraydogan/vision-transformer/issues/1
    def __init__(self) -> None:
        super().__init__()
        self.projection, self.output = nn.Linear(C, 3 * C), nn.Linear(C, C)

    def forward(self, x):
        q, k, v = self.projection(x).unflatten(-1, (H, 3 * D)).chunk(3, dim=-1)
        attn = torch.einsum("bihd,bjhd->bijh", q, k) * D**-0.5
        return self.output(torch.einsum("bijh,bjhd->bihd", attn.softmax(dim=1), v).flatten(2))


class OverHeads(Heads):
    # dim=1 of four axes: https://github.com/FudanNLP/fastNLP/issues/254
    def get_hidden_score(self):
        return -1e9

    def normal(self, scores):
        return F.softmax(scores, dim=1)


class OverBatch(nn.Module):
    # https://github.com/PetrochukM/PyTorch-NLP/issues/2
    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(C, D, bias=False) for _ in range(3))

    def forward(self, x):
        scores = torch.bmm(self.to_q(x), self.to_k(x).transpose(1, 2)) / math.sqrt(D)
        return torch.bmm(nn.Softmax(dim=0)(scores), self.to_v(x))


class OverHeadsAndKeys(nn.Module):
    # heads and keys flattened together: https://github.com/facebookresearch/detr/issues/247
    def __init__(self) -> None:
        super().__init__()
        self.q_linear, self.k_linear, self.v_linear = (nn.Linear(C, C) for _ in range(3))

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (H, D)) for f in (self.q_linear, self.k_linear, self.v_linear))
        weights = torch.einsum("bqnc,bknc->bqnk", q * D**-0.5, k)
        weights = F.softmax(weights.flatten(2), dim=-1).view(weights.size())
        return torch.einsum("bqnk,bknc->bqnc", weights, v).flatten(2)


class NoSoftmax(Heads):
    # https://github.com/PaddlePaddle/PaddleOCR/pull/4556
    def get_hidden_score(self):
        return 0.0

    def normal(self, scores):
        return scores


class SoftmaxTwice(Heads):
    # https://github.com/layer6ai-labs/TabDPT-inference/pull/46 took it once too often
    def normal(self, scores):
        return super().normal(super().normal(scores))


class ExpUndivided(Heads):
    # the numerator alone
    def normal(self, scores):
        return (scores - scores.amax(-1, keepdim=True)).exp()


class DividedByAbsoluteScores(Heads):
    # F.normalize over the keys
    def get_hidden_score(self):
        return 0.0

    def normal(self, scores):
        return F.normalize(scores, p=1, dim=-1)


class DividedByLength(DividedByAbsoluteScores):
    # F.normalize as it is by default
    def normal(self, scores):
        return F.normalize(scores, dim=-1)


class DividedByScores(Heads):
    # the lectures' first softmax, by the sum of the scores themselves, where some are negative
    def get_hidden_score(self):
        return 0.0

    def normal(self, scores):
        return scores / scores.sum(-1, keepdim=True)


class ExpOverflows(Heads):
    # https://github.com/pytorch/executorch/pull/18407
    # https://github.com/NVIDIA/FasterTransformer/issues/43
    def normal(self, scores):
        numbers = torch.exp(scores)
        return numbers / numbers.sum(dim=-1, keepdim=True)


def exp_overflows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    # https://github.com/pyg-team/pytorch_geometric/issues/53
    numbers = torch.exp(q @ k.mT / math.sqrt(q.shape[-1])).tril()
    return numbers / numbers.sum(-1, keepdim=True) @ v


class MaskTooSmall(Heads):
    # -1e4 hides nothing from scores that are lower still: https://github.com/huggingface/transformers/issues/14859
    # https://github.com/TransformerLensOrg/TransformerLens/pull/319
    def get_hidden_score(self):
        return -1e4


class HalfInside(Heads):
    # scores rounded to half precision in a layer of float32: https://github.com/AI-Hypercomputer/maxtext/pull/1225
    def scale_scores(self, scores):
        return (scores / math.sqrt(D)).to(torch.bfloat16).to(scores.dtype)


def keys_filled_up(q, k, v):
    """Keys and values of zeros fill up a block, and nothing hides them: a score of 0 is a weight."""
    more = -k.shape[-2] % 16
    k, v = (F.pad(x, (0, 0, 0, more)) for x in (k, v))
    return (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v


class HalfSums(nn.Module):
    # sums kept in the dtype of what comes in, token after token: https://github.com/apple/axlearn/pull/18
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(C, D, bias=False, dtype=torch.bfloat16) for _ in range(3))

    def forward(self, x):
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        t = x.shape[1]
        scores = (q @ k.mT / math.sqrt(D)).masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), -torch.inf)
        numbers = torch.exp(scores - scores.amax(-1, keepdim=True))
        total, context = torch.zeros_like(q[..., :1]), torch.zeros_like(v)
        for j in range(t):
            weight = numbers[..., j, None]
            total, context = total + weight, context + weight * v[:, j, None]
        return context / total
