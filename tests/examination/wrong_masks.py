"""Layers whose mask is wrong, as people wrote them."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

C, H, T = 24, 4, 6
LENGTHS = (3, 6)  # real tokens of two padded sequences


class Projected(nn.Module):
    """One head, three linear layers; what `weigh` does with the scores is each class's own."""

    def __init__(self, d_in: int = 14, d_out: int = 6) -> None:
        super().__init__()
        self.W_query = nn.Linear(d_in, d_out, bias=False)
        self.W_key = nn.Linear(d_in, d_out, bias=False)
        self.W_value = nn.Linear(d_in, d_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.W_query(x), self.W_key(x)
        return self.weigh(q @ k.transpose(1, 2) / k.shape[-1] ** 0.5) @ self.W_value(x)

    def weigh(self, scores: Tensor) -> Tensor:
        raise NotImplementedError


class LecturesTril(Projected):
    # the lectures' own: tril of the scores, and the softmax of that
    # https://github.com/georg-wolflein/good-features/pull/1
    def weigh(self, scores):
        return torch.softmax(torch.tril(scores), dim=-1)


class FillNotKept(Projected):
    # https://github.com/lucidrains/flamingo-pytorch/issues/10
    # https://github.com/facebookresearch/ParlAI/pull/3068
    def weigh(self, scores):
        t = scores.shape[-1]
        scores.masked_fill(torch.triu(torch.ones(t, t), diagonal=1).bool(), float("-inf"))
        return scores.softmax(-1)


class TinyFill(Projected):
    # https://github.com/awslabs/gluonts/pull/1401
    # https://github.com/Shujun-He/RibonanzaNet/issues/5
    def weigh(self, scores):
        allowed = torch.tril(torch.ones(scores.shape[-2:]))
        return F.softmax(scores.masked_fill(allowed == 0, -1e-9), dim=-1)


class AfterSoftmax(Projected):
    # https://github.com/huggingface/pytorch-image-models/pull/2236
    def weigh(self, scores):
        return scores.softmax(-1) * torch.ones_like(scores).tril()


class OnesAdded(Projected):
    # a table of 0 and 1 added as if it were 0 and -inf: https://github.com/timeseriesAI/tsai/issues/171
    def weigh(self, scores):
        return (scores + torch.triu(torch.ones_like(scores), 1)).softmax(-1)


class OwnTokenHidden(Projected):
    # https://github.com/pbloem/former/issues/10
    def weigh(self, scores):
        t = scores.shape[-1]
        indices = torch.triu_indices(t, t, offset=0)
        scores[:, indices[0], indices[1]] = float("-inf")
        return F.softmax(scores, dim=2)


class OwnTokenHiddenFinite(Projected):
    # the same with a finite number, so that only the pattern tells: https://github.com/pbloem/former/issues/10
    def weigh(self, scores):
        hidden = torch.ones_like(scores).triu(0).bool()
        hidden[:, 0, 0] = False
        return scores.masked_fill(hidden, -1e9).softmax(-1)


class OneTooMany(Projected):
    # https://github.com/RVC-Boss/GPT-SoVITS/issues/965 asks which diagonal it should be
    def weigh(self, scores):
        return scores.masked_fill(torch.ones_like(scores).triu(diagonal=2).bool(), -torch.inf).softmax(-1)


class PositiveInfinity(Projected):
    # https://github.com/lucidrains/memory-compressed-attention/issues/2
    def weigh(self, scores):
        return scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -float("-inf")).softmax(-1)


class SoftcapAfterMask(Projected):
    # https://github.com/onnx/onnx/issues/7865
    # https://github.com/Dao-AILab/flash-attention/pull/1025
    def weigh(self, scores):
        hidden = torch.ones_like(scores).triu(1).bool()
        return (5.0 * torch.tanh(scores.masked_fill(hidden, -torch.inf) / 5.0)).softmax(-1)


class Fused(nn.Module):
    """Several heads from one linear layer, and F.scaled_dot_product_attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(C, 3 * C)
        self.proj = nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(x).reshape(b, t, 3, H, c // H).permute(2, 0, 3, 1, 4)
        return self.proj(self.attend(q, k, v).transpose(1, 2).reshape(b, t, c))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise NotImplementedError


class Inverted(Fused):
    # True hides in nn.MultiheadAttention and shows here: https://github.com/rasbt/LLMs-from-scratch/issues/1061
    # https://github.com/lucidrains/x-transformers/issues/160
    def attend(self, q, k, v):
        later = torch.triu(torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool), diagonal=1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=later)


class MaskForgotten(Fused):
    # a path without the mask that the other has: https://github.com/facebookresearch/xformers/issues/103
    # https://github.com/keras-team/keras/issues/23038
    def attend(self, q, k, v, attn_mask=None):
        if attn_mask is None:
            return F.scaled_dot_product_attention(q, k, v)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, is_causal=True)


class CausalEncoder(Fused):
    # https://github.com/sgl-project/sglang/pull/35434
    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class WindowTooLong(Fused):
    # https://github.com/huggingface/transformers/issues/39408
    # https://github.com/ml-explore/mlx-lm/pull/390
    window = 3  # the token itself and two before it

    def attend(self, q, k, v):
        place = torch.arange(q.shape[-2])
        back = place[:, None] - place
        return F.scaled_dot_product_attention(q, k, v, attn_mask=(back >= 0) & (back <= self.window))


class WindowBothWays(Fused):
    # a window that looks ahead as far as back: https://github.com/huggingface/transformers/issues/39408
    def attend(self, q, k, v):
        place = torch.arange(q.shape[-2])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=(place[:, None] - place).abs() <= 2)


class DocumentsForgotten(Fused):
    # https://github.com/huggingface/nanoVLM/pull/204
    # https://github.com/axolotl-ai-cloud/axolotl/pull/3796
    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Padded(nn.Module):
    """An encoder's heads by einsum, and a padding mask from the lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(C, C, bias=False) for _ in range(3))
        self.to_out = nn.Linear(C, C)

    def real(self) -> Tensor:
        return torch.arange(T)[None] < torch.tensor(LENGTHS)[:, None]  # (b, t)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (H, -1)) for f in (self.to_q, self.to_k, self.to_v))
        scores = torch.einsum("bihd,bjhd->bhij", q, k) * (C // H) ** -0.5
        context = torch.einsum("bhij,bjhd->bihd", self.hide(scores).softmax(dim=-1), v)
        return self.to_out(context.flatten(2))

    def hide(self, scores: Tensor) -> Tensor:
        raise NotImplementedError


class PaddingInverted(Padded):
    # https://github.com/lucidrains/halonet-pytorch/issues/4
    # https://github.com/mlwithme/TransformerTranslation/issues/6
    def hide(self, scores):
        return scores.masked_fill(self.real()[:, None, None, :], -1e9)


class PaddingOfQueries(Padded):
    # unsqueeze(3) where unsqueeze(2) belongs: https://github.com/hyunwoongko/transformer/pull/40
    # https://github.com/lsdefine/attention-is-all-you-need-keras/issues/16
    def hide(self, scores):
        return scores.masked_fill(~self.real().unsqueeze(1).unsqueeze(3), -10000.0)


class PaddingForgotten(Padded):
    # https://github.com/huggingface/candle/issues/3567 has the one mask and drops the other
    def hide(self, scores):
        return scores


class PaddingOfOtherSequences(Padded):
    # a mask repeated batch by batch against scores that stand head by head:
    # https://github.com/lsdefine/attention-is-all-you-need-keras/issues/36
    def hide(self, scores):
        b, h, t, _ = scores.shape
        mask = ~self.real().repeat(h, 1)  # (h b, t), and the scores are (b h, t, t)
        return scores.reshape(b * h, t, t).masked_fill(mask[:, None, :], -torch.inf).view(b, h, t, t)


class BlindRows(Padded):
    # a padded query may see nothing: NaN. https://github.com/pytorch/pytorch/issues/41508
    def hide(self, scores):
        both = self.real()[:, :, None] & self.real()[:, None, :]
        return scores.masked_fill(~both.unsqueeze(1), -torch.inf)


class UniformRows(Padded):
    # the same rows see everything alike: https://github.com/NVIDIA/apex/issues/1390
    def hide(self, scores):
        both = self.real()[:, :, None] & self.real()[:, None, :]
        return scores.masked_fill(~both.unsqueeze(1), torch.finfo(scores.dtype).min)


def decoding(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    # top left, where the queries are the last tokens: https://github.com/pytorch/pytorch/issues/144858
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class CacheAtTheEnd(nn.Module):
    # the mask of a full forward while decoding: https://github.com/pytorch/pytorch/issues/103082
    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(C, 3 * C), nn.Linear(C, C)

    def forward(self, x, layer_past=None, use_cache=False):
        b, t, c = x.shape
        q, k, v = (one.view(b, t, H, c // H).transpose(1, 2) for one in self.c_attn(x).split(c, dim=2))
        if layer_past is not None:
            k, v = torch.cat((layer_past[0], k), dim=-2), torch.cat((layer_past[1], v), dim=-2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c)
        return (self.c_proj(y), (k, v)) if use_cache else self.c_proj(y)


class SummaryOfBlock(Projected):
    # each token gets the mean of all: https://github.com/karpathy/nanochat/issues/844
    def forward(self, x):
        x = x - x.mean(dim=1, keepdim=True)
        return super().forward(x)

    def weigh(self, scores):
        return scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf).softmax(-1)


class NormOverTokens(nn.Module):
    # a norm of the whole sequence: https://github.com/anicolson/DeepXi/issues/18
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm((T, C))
        self.attention = nn.MultiheadAttention(C, H, batch_first=True)

    def forward(self, x):
        y = self.norm(x)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
