"""Right layers as people write them, each in a way of its own: projections, positions, masks, norms, caches, sources."""

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

from examination.wrong_calls import Rotary
from examination.wrong_designs import (
    Differential,
    DifferentialOfKernels,
    Latent,
    LatentFolded,
    NormedAcrossHeads,
    TableViewed,
)
from examination.wrong_sources import C, Cross, D, DecoderBlock, H, Written, join, split
from regard import Causal, Documents, Everything, Given, Padding, Prefix

T = 6


class Plain(nn.Module):
    """Projections q_proj, k_proj, v_proj and o_proj; the rest is each class's own."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(C, C) for _ in range(4))

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, x):
        q, k, v = (split(f(x)) for f in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(join(self.attend(q, k, v)))


def hide(scores):
    return scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)


class CacheWithReset(Plain):
    """Keys and values are kept until reset()."""

    def __init__(self):
        super().__init__()
        self.reset()

    def reset(self):
        self.kept = []

    def attend(self, q, k, v):
        self.kept.append((k, v))
        k, v = (torch.cat(parts, 2) for parts in zip(*self.kept, strict=True))
        t, n = q.shape[2], k.shape[2]
        return F.scaled_dot_product_attention(q, k, v, torch.ones(t, n, dtype=torch.bool).tril(n - t))


class CacheByPosition(Plain):
    """Buffers of keys and values, written at start_pos, as LLaMA's own code has them."""

    def __init__(self):
        super().__init__()
        for name in ("cache_k", "cache_v"):
            self.register_buffer(name, torch.zeros(8, H, 300, D), persistent=False)

    def forward(self, x, start_pos=0):
        b, t, _ = x.shape
        q, k, v = (split(f(x)) for f in (self.q_proj, self.k_proj, self.v_proj))
        stop = start_pos + t
        if not torch.is_grad_enabled() and b <= 8 and stop <= 300 and k.dtype == self.cache_k.dtype:
            self.cache_k[:b, :, start_pos:stop], self.cache_v[:b, :, start_pos:stop] = k, v
            k, v = self.cache_k[:b, :, :stop], self.cache_v[:b, :, :stop]
        seen = torch.ones(t, k.shape[2], dtype=torch.bool).tril(k.shape[2] - t)
        return self.o_proj(join(F.scaled_dot_product_attention(q, k, v, seen)))


class BiasBeforeSoftmax(Written):
    """ALiBi by hand, added to the scores."""

    def weigh(self, scores):
        return self.hide(scores + self.bias(scores.shape[-1]).to(scores.dtype)).softmax(-1)


class RelativeTable(Written):
    """Swin's table of relative positions, added to the scores of an encoder."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(H, 2 * 600))

    def place(self, q, k):
        return q, k

    def weigh(self, scores):
        t = scores.shape[-1]
        back = torch.arange(t)[:, None] - torch.arange(t) + 600
        return (scores + self.table[:, back]).softmax(-1)


class GatedUnit(nn.Module):
    """A gated attention unit: squared ReLUs of scores are the weights, exactly 0 for half of all pairs."""

    def __init__(self):
        super().__init__()
        self.to_hidden, self.to_shared, self.to_out = nn.Linear(C, 4 * C), nn.Linear(C, 16), nn.Linear(2 * C, C)
        self.gamma, self.beta = nn.Parameter(torch.randn(2, 16)), nn.Parameter(torch.randn(2, 16))

    def forward(self, x):
        gate, v = F.silu(self.to_hidden(x)).chunk(2, -1)
        q, k = (F.silu(self.to_shared(x)).unsqueeze(-2) * self.gamma + self.beta).unbind(-2)
        weights = F.relu(q @ k.mT / x.shape[1]).square()
        return self.to_out(gate * (weights @ v))


class TableOfWindow(TableViewed):
    """A table of relative positions whose rows are permuted to heads first, as in Swin."""

    def arrange(self, rows):
        return rows.view(6, 6, H).permute(2, 0, 1)


class NormalizedHeads(NormedAcrossHeads):
    """F.normalize over the width of each head, and a temperature."""

    axis = -1


class NormedAllHeads(Rotary):
    """A norm of the whole width before heads are split, as in OLMo 2."""

    def __init__(self):
        super().__init__()
        self.q_norm, self.k_norm = nn.RMSNorm(C), nn.RMSNorm(C)

    def split(self, x):
        return [split(y) for y in (self.q_norm(self.q_proj(x)), self.k_norm(self.k_proj(x)), self.v_proj(x))]


class LayerNormedHeads(Rotary):
    """A LayerNorm of queries and keys of each head."""

    def __init__(self):
        super().__init__()
        self.q_norm, self.k_norm = nn.LayerNorm(D), nn.LayerNorm(D)

    def place(self, q, k):
        return super().place(self.q_norm(q), self.k_norm(k))


class SoftcapStated(Written):
    """A softcap of scaled scores, before the mask."""

    softcap = 2.0

    def attend(self, q, k, v):
        return self.weigh(self.softcap * torch.tanh(q @ k.mT / math.sqrt(D) / self.softcap)) @ v


class SinksBesideScores(Written):
    """A sink for each head, in the denominator."""

    def __init__(self):
        super().__init__()
        self.sinks = nn.Parameter(torch.linspace(-1, 2, H))

    def weigh(self, scores):
        b, _, t, _ = scores.shape
        sinks = self.sinks.view(1, H, 1, 1).expand(b, H, t, 1)
        return torch.cat([self.hide(scores), sinks], -1).softmax(-1)[..., :-1]


class SinksInTheMask(SinksBesideScores):
    """Sinks for a kernel: a key of zeros before the others, whose numbers in the mask are the sinks."""

    def attend(self, q, k, v):
        t = q.shape[2]
        first = lambda x: torch.cat((torch.zeros_like(x[:, :, :1]), x), 2)  # noqa: E731
        hidden = torch.zeros(t, t, dtype=q.dtype).masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), -torch.inf)
        sinks = self.sinks.view(1, H, 1, 1).expand(1, H, t, 1).to(q.dtype)
        mask = torch.cat((sinks, hidden.expand(1, H, t, t)), -1)
        return F.scaled_dot_product_attention(q, first(k), first(v), mask)


class LatentUnabsorbed(Latent):
    """Latent attention as it is trained: keys and values of each head are made from the latent."""

    def forward(self, x):
        q = self.q_proj(x).unflatten(-1, (H, -1)).transpose(1, 2)
        q_nope, q_rope = q.split((self.nope, self.rope), -1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split((self.latent, self.rope), -1)
        both = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (H, -1)).transpose(1, 2)
        k_nope, v = both.split((self.nope, D), -1)
        k_rope = self.turn(k_rope).unsqueeze(1).expand(-1, H, -1, -1)
        q, k = torch.cat((q_nope, self.turn(q_rope)), -1), torch.cat((k_nope, k_rope), -1)
        return self.o_proj(join(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


class PaddingBeforeSoftmax(Written):
    """Padded keys have -inf before the softmax, beside rotary positions."""

    def weigh(self, scores):
        real = torch.arange(scores.shape[-1]) < torch.tensor((3, 6))[:, None]
        return scores.masked_fill(~real[:, None, None], -torch.inf).softmax(-1)


class FilledUpAndHidden(Rotary):
    """Keys are filled up to a multiple of 8, and what fills them up is hidden."""

    def attend(self, q, k, v):
        n, more = k.shape[2], -k.shape[2] % 8
        k, v = (F.pad(x, (0, 0, 0, more)) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, (torch.arange(n + more) < n).expand(q.shape[2], -1))


class ComplexRotary(Rotary):
    """Neighboring columns as complex numbers, as in LLaMA's own code."""

    def place(self, q, k):
        angles = self.angles(q.shape[2]).to(q.dtype)
        turn = torch.polar(torch.ones_like(angles), angles)

        def rotate(x):
            return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * turn).flatten(-2)

        return rotate(q), rotate(k)


class PartialRotary(Rotary):
    """Rotary positions of the first four columns alone."""

    def place(self, q, k):
        angles = torch.arange(q.shape[2])[:, None].to(q.dtype) * 100 ** (-torch.arange(2, dtype=q.dtype) / 2)

        def rotate(x):
            one, other, rest = x[..., :2], x[..., 2:4], x[..., 4:]
            cos, sin = angles.cos(), angles.sin()
            return torch.cat((one * cos - other * sin, other * cos + one * sin, rest), -1)

        return rotate(q), rotate(k)


class RotaryTables(Rotary):
    """cos and sin of positions in buffers, doubled for both halves, with rotate_half."""

    def __init__(self):
        super().__init__()
        angles = torch.arange(600)[:, None] * torch.cat((self.inv_freq, self.inv_freq))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def place(self, q, k):
        t = q.shape[2]
        cos, sin = self.cos[:t].to(q.dtype), self.sin[:t].to(q.dtype)

        def rotate_half(x):
            one, other = x.chunk(2, -1)
            return torch.cat((-other, one), -1)

        return tuple(x * cos + rotate_half(x) * sin for x in (q, k))


class RotaryOfGrid(Rotary):
    """Rows of a grid of width 3 in the first columns, and its columns in the last ones: an image encoder."""

    def place(self, q, k):
        place = torch.arange(q.shape[2])
        angles = torch.stack((place // 3, place % 3, place // 3), 1).to(q.dtype) * torch.tensor([1.0, 1.0, 0.1], dtype=q.dtype)

        def rotate(x):
            one, other = x.chunk(2, -1)
            return torch.cat((one * angles.cos() - other * angles.sin(), other * angles.cos() + one * angles.sin()), -1)

        return rotate(q), rotate(k)

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)


class RelativeKeys(Plain):
    """A learned vector for each distance joins the keys, as in Shaw et al. 2018."""

    def __init__(self):
        super().__init__()
        self.distances = nn.Parameter(torch.randn(600, D))

    def attend(self, q, k, v):
        t = q.shape[2]
        back = (torch.arange(t)[:, None] - torch.arange(t)).clamp(min=0)
        relative = torch.einsum("bhid,ijd->bhij", q, self.distances[back])
        return hide((q @ k.mT + relative) / math.sqrt(D)).softmax(-1) @ v


class CausalConvolution(Rotary):
    """A convolution over earlier tokens before the projections."""

    def __init__(self):
        super().__init__()
        self.convolve = nn.Conv1d(C, C, 3, groups=C)

    def forward(self, x):
        return super().forward(self.convolve(F.pad(x.mT, (2, 0))).mT)


class TokenShift(Plain):
    """Half of the channels come from the token before."""

    def forward(self, x):
        return super().forward(torch.cat((x[..., : C // 2], F.pad(x[..., C // 2 :], (0, 0, 1, 0))[:, :-1]), -1))


class ParallelBlock(nn.Module):
    """Attention and feed-forward part beside one another, as in GPT-J."""

    def __init__(self):
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(C), Rotary()
        self.mlp = nn.Sequential(nn.Linear(C, 2 * C), nn.GELU(), nn.Linear(2 * C, C))

    def forward(self, x):
        y = self.norm(x)
        return x + self.attn(y) + self.mlp(y)


class SandwichNorm(nn.Module):
    """Norms before and after attention, written by hand, and a learned factor on the branch."""

    def __init__(self):
        super().__init__()
        self.before, self.after = (nn.Parameter(torch.ones(C)) for _ in range(2))
        self.attn, self.gamma = Plain(), nn.Parameter(torch.full((C,), 0.1))

    def norm(self, x, weight):
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight

    def forward(self, x):
        return x + self.gamma * self.norm(self.attn(self.norm(x, self.before)), self.after)


class HeadGate(Plain):
    """A gate for each head, made of the input."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(C, H)

    def forward(self, x):
        q, k, v = (split(f(x)) for f in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(join(self.attend(q, k, v) * self.gate(x).sigmoid().mT.unsqueeze(-1)))


class ValueResidual(nn.Module):
    """Two layers; the values of the second are mixed with those of the first."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Plain(), Plain()
        self.mix = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        values = self.first.v_proj(x)
        x = x + self.first(x)
        q, k, v = self.second.q_proj(x), self.second.k_proj(x), torch.lerp(self.second.v_proj(x), values, self.mix)
        return x + self.second.o_proj(join(self.second.attend(*map(split, (q, k, v)))))


class Chunked(Plain):
    """Tokens see earlier ones of their chunk of three, by a reshape."""

    def attend(self, q, k, v):
        t = q.shape[2]
        more = -t % 3
        q, k, v = (F.pad(x, (0, 0, 0, more)).unflatten(2, (-1, 3)) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).flatten(2, 3)[:, :, :t]


class Strided(Plain):
    """Every third earlier token, and the token itself."""

    def attend(self, q, k, v):
        t = q.shape[2]
        back = torch.arange(t)[:, None] - torch.arange(t)
        return F.scaled_dot_product_attention(q, k, v, (back >= 0) & (back % 3 == 0))


class PrefixModel(Plain):
    """The first three tokens are seen by all."""

    def attend(self, q, k, v):
        t = q.shape[2]
        seen = torch.ones(t, t, dtype=torch.bool).tril() | (torch.arange(t) < 3)
        return F.scaled_dot_product_attention(q, k, v, seen)


class InducedSet(nn.Module):
    """A set transformer's block: learned points read the tokens, and the tokens read the points."""

    def __init__(self):
        super().__init__()
        self.points = nn.Parameter(torch.randn(1, 5, C))
        self.read, self.write = (nn.MultiheadAttention(C, H, batch_first=True) for _ in range(2))

    def forward(self, x):
        points = self.points.expand(len(x), -1, -1)
        read = self.read(points, x, x)[0]
        return self.write(x, read, read)[0]


class OtherWidths(nn.Module):
    """Heads that are wider than the model, and values of another width than keys."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(C, H * 10), nn.Linear(C, H * 10)
        self.v_proj, self.o_proj = nn.Linear(C, H * 7), nn.Linear(H * 7, C)

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (H, -1)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(join(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


class FusedByHead(nn.Module):
    """One projection whose columns are q, k and v of each head in turn, as in GPT-NeoX."""

    def __init__(self):
        super().__init__()
        self.query_key_value, self.dense = nn.Linear(C, 3 * C), nn.Linear(C, C)

    def forward(self, x):
        q, k, v = self.query_key_value(x).view(*x.shape[:2], H, 3 * D).transpose(1, 2).chunk(3, -1)
        return self.dense(join(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


class BatchedByBmm(Plain):
    """Heads folded into the batch, and torch.bmm, as in fairseq."""

    def attend(self, q, k, v):
        q, k, v = (x.flatten(0, 1) for x in (q * D**-0.5, k, v))
        return torch.bmm(hide(torch.bmm(q, k.transpose(1, 2))).softmax(-1), v).unflatten(0, (-1, H))


class SequenceFirst(Plain):
    """Tokens before the batch inside, (t, b h, d)."""

    def forward(self, x):
        b, t, _ = x.shape
        x = x.transpose(0, 1)
        q, k, v = (f(x).contiguous().view(t, b * H, D).transpose(0, 1) for f in (self.q_proj, self.k_proj, self.v_proj))
        weights = hide(torch.bmm(q, k.transpose(1, 2)) / math.sqrt(D)).softmax(-1)
        return self.o_proj(torch.bmm(weights, v).transpose(0, 1).contiguous().view(t, b, C)).transpose(0, 1)


class Baddbmm(Plain):
    """The scale and the mask in torch.baddbmm, as in Megatron and BLOOM."""

    def attend(self, q, k, v):
        t = q.shape[2]
        mask = torch.zeros(t, t, dtype=q.dtype).masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), -1e30)
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        scores = torch.baddbmm(mask.expand(len(q), t, t), q, k.mT, beta=1.0, alpha=D**-0.5)
        return torch.bmm(scores.softmax(-1), v).unflatten(0, (-1, H))


class ScaledBoth(Plain):
    """Queries and keys each times d to the -1/4, as in Whisper."""

    def attend(self, q, k, v):
        return hide((q * D**-0.25) @ (k * D**-0.25).mT).softmax(-1) @ v


class UpcastSoftmax(Plain):
    """Scores in float32 for the softmax, and the dtype's least number as the mask."""

    def attend(self, q, k, v):
        scores = q @ k.mT / math.sqrt(D)
        mask = torch.full(scores.shape[-2:], torch.finfo(scores.dtype).min, dtype=scores.dtype).triu(1)
        return F.softmax((scores + mask), dim=-1, dtype=torch.promote_types(torch.float32, v.dtype)).to(v.dtype) @ v


class ByLogSumExp(Plain):
    """exp(scores - logsumexp)."""

    def attend(self, q, k, v):
        scores = hide(q @ k.mT / math.sqrt(D))
        return (scores - scores.logsumexp(-1, keepdim=True)).exp() @ v


class SoftmaxModule(Plain):
    """nn.Softmax and nn.Dropout, and torch.where for the mask."""

    def __init__(self):
        super().__init__()
        self.softmax, self.dropout = nn.Softmax(dim=-1), nn.Dropout(0.1)

    def attend(self, q, k, v):
        scores = torch.matmul(q, k.transpose(-1, -2)).div(math.sqrt(D))
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = torch.where(seen, scores, torch.tensor(-1e9, dtype=scores.dtype))
        return torch.matmul(self.dropout(self.softmax(scores)), v)


class Adapted(Plain):
    """LoRA whose second matrix starts at zero."""

    def __init__(self):
        super().__init__()
        self.lora_a, self.lora_b = nn.Linear(C, 2, bias=False), nn.Linear(2, C, bias=False)
        nn.init.zeros_(self.lora_b.weight)

    def forward(self, x):
        q = self.q_proj(x) + self.lora_b(self.lora_a(x))
        return self.o_proj(join(self.attend(*map(split, (q, self.k_proj(x), self.v_proj(x))))))


class WeightNormed(Plain):
    """A parametrization of the queries' weight."""

    def __init__(self):
        super().__init__()
        nn.utils.parametrizations.weight_norm(self.q_proj)


class CosineAttention(nn.Module):
    """Swin v2: cosines times a learned factor, and a bias made by a small network of distances."""

    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.logit_scale = nn.Parameter(torch.full((H, 1, 1), math.log(10)))
        self.cpb_mlp = nn.Sequential(nn.Linear(1, 16), nn.ReLU(), nn.Linear(16, H, bias=False))

    def forward(self, x):
        t = x.shape[1]
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, H, D).permute(2, 0, 3, 1, 4)
        scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * self.logit_scale.clamp(max=math.log(100)).exp()
        back = (torch.arange(t)[:, None] - torch.arange(t)).to(x.dtype)
        bias = 16 * self.cpb_mlp((back.sign() * back.abs().log1p()).unsqueeze(-1)).sigmoid().permute(2, 0, 1)
        return self.proj(join((scores + bias).softmax(-1) @ v))


class LogarithmicBias(Written):
    """KERPLE: a learned logarithm of the distance."""

    def __init__(self):
        super().__init__()
        self.rate = nn.Parameter(torch.linspace(0.5, 2, H).view(H, 1, 1))

    def place(self, q, k):
        return q, k

    def weigh(self, scores):
        t = scores.shape[-1]
        back = (torch.arange(t)[:, None] - torch.arange(t)).clamp(min=0)
        return self.hide(scores - self.rate * torch.log1p(back.to(scores.dtype))).softmax(-1)


class OneParameter(nn.Module):
    """One parameter (3, c, h, d) for all projections, and one for the output, by einsum."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Parameter(torch.randn(3, C, H, D) / math.sqrt(C))
        self.out = nn.Parameter(torch.randn(H, D, C) / math.sqrt(C))

    def forward(self, x):
        q, k, v = torch.einsum("btc,nchd->nbhtd", x, self.qkv)
        weights = hide(torch.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(D)).softmax(-1)
        return torch.einsum("bhij,bhjd,hdc->bic", weights, v, self.out)


class TokensBeforeHeads(Plain):
    """(b, t, h, d) throughout, by einsum."""

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (H, D)) for f in (self.q_proj, self.k_proj, self.v_proj))
        weights = hide(torch.einsum("bthd,bshd->bhts", q, k) * D**-0.5).softmax(-1)
        return self.o_proj(torch.einsum("bhts,bshd->bthd", weights, v).flatten(2))


class GroupedByEinsum(nn.Module):
    """Groups of queries share keys without repeating them."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(C, C), nn.Linear(C, C)
        self.k_proj, self.v_proj = (nn.Linear(C, C // 2) for _ in range(2))

    def forward(self, x):
        q = self.q_proj(x).unflatten(-1, (2, H // 2, D))
        k, v = (f(x).unflatten(-1, (2, D)) for f in (self.k_proj, self.v_proj))
        weights = hide(torch.einsum("btgrd,bsgd->bgrts", q, k) / math.sqrt(D)).softmax(-1)
        return self.o_proj(torch.einsum("bgrts,bsgd->btgrd", weights, v).flatten(2))


class QueryBlocks(Plain):
    """Four queries at a time, against all keys that they may see."""

    def attend(self, q, k, v):
        parts = []
        for first in range(0, q.shape[2], 4):
            rows = q[:, :, first : first + 4]
            stop = first + rows.shape[2]
            seen = torch.arange(first, stop)[:, None] >= torch.arange(stop)
            parts.append(F.scaled_dot_product_attention(rows, k[:, :, :stop], v[:, :, :stop], seen))
        return torch.cat(parts, 2)


class AdditiveMask(Plain):
    """A mask of numbers for the kernel."""

    def attend(self, q, k, v):
        t = q.shape[2]
        mask = torch.zeros(t, t, dtype=q.dtype).masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), -torch.inf)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[None, None])


class Convolutional(nn.Module):
    """Projections by a convolution of one token, over channels first."""

    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Conv1d(C, 3 * C, 1), nn.Conv1d(C, C, 1)

    def forward(self, x):
        q, k, v = self.qkv(x.mT).unflatten(1, (3, H, D)).mT.unbind(1)
        return self.proj(F.scaled_dot_product_attention(q, k, v).mT.flatten(1, 2)).mT


class SharedQueriesAndKeys(nn.Module):
    """One projection for queries and keys, as in Reformer."""

    def __init__(self):
        super().__init__()
        self.to_qk, self.to_v, self.to_out = (nn.Linear(C, C) for _ in range(3))

    def forward(self, x):
        qk, v = split(self.to_qk(x)), split(self.to_v(x))
        return self.to_out(join(F.scaled_dot_product_attention(qk, F.normalize(qk, dim=-1) * math.sqrt(D), v, is_causal=True)))


class HeadsOneByOne(Plain):
    """A loop over the heads."""

    def attend(self, q, k, v):
        return torch.stack([F.scaled_dot_product_attention(q[:, h], k[:, h], v[:, h], is_causal=True) for h in range(H)], 1)


class ReturnsRecord(Plain):
    """A dictionary of the output and the weights."""

    def forward(self, x):
        q, k, v = (split(f(x)) for f in (self.q_proj, self.k_proj, self.v_proj))
        weights = hide(q @ k.mT / math.sqrt(D)).softmax(-1)
        return {"hidden_states": self.o_proj(join(weights @ v)), "attentions": weights}


class DroppedPath(nn.Module):
    """Stochastic depth of the branch, in training."""

    def __init__(self):
        super().__init__()
        self.attn = Plain()

    def forward(self, x):
        y = self.attn(x)
        if self.training:
            y = y * (torch.rand(len(x), 1, 1) > 0.2) / 0.8
        return x + y


class Bottleneck(nn.Module):
    """Attention in half of the width, between two projections."""

    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Linear(2 * C, C), nn.Linear(C, 2 * C)
        self.attn = Rotary()

    def forward(self, x):
        return x + self.up(self.attn(self.down(x)))


class Registers(nn.Module):
    """Tokens of its own that all see, and that are cut off at the end."""

    def __init__(self):
        super().__init__()
        self.registers, self.attn = nn.Parameter(torch.randn(1, 3, C)), nn.MultiheadAttention(C, H, batch_first=True)

    def forward(self, x):
        x = torch.cat((self.registers.expand(len(x), -1, -1), x), 1)
        return self.attn(x, x, x, need_weights=False)[0][:, 3:]


class Flex(Plain):
    """torch's flex_attention, which has no backward on a CPU."""

    def attend(self, q, k, v):
        return flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: torch.where(i >= j, score, -torch.inf))


class LatentCached(LatentUnabsorbed):
    """Latent attention whose cache holds the latents and the rotary keys in one tensor, (b, t, latent + rope)."""

    def forward(self, x, latent_cache=None, use_cache=False):
        before = 0 if latent_cache is None else latent_cache.shape[1]
        new = self.kv_a_proj_with_mqa(x)
        cache = new if latent_cache is None else torch.cat((latent_cache, new), 1)
        q = self.q_proj(x).unflatten(-1, (H, -1)).transpose(1, 2)
        q_nope, q_rope = q.split((self.nope, self.rope), -1)
        latent, k_rope = cache.split((self.latent, self.rope), -1)
        k_nope, v = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (H, -1)).transpose(1, 2).split((self.nope, D), -1)
        k = torch.cat((k_nope, self.turn(k_rope).unsqueeze(1).expand(-1, H, -1, -1)), -1)
        q_rope = self.turn(F.pad(q_rope, (0, 0, before, 0)))[:, :, before:]
        seen = torch.ones(x.shape[1], k.shape[2], dtype=torch.bool).tril(before)
        y = self.o_proj(join(F.scaled_dot_product_attention(torch.cat((q_nope, q_rope), -1), k, v, seen)))
        return (y, cache) if use_cache else y


class ScaledInPlace(Rotary):
    """The output of the queries' projection is scaled in place, as in fairseq and ESM."""

    def split(self, x):
        q, k, v = super().split(x)
        q *= D**-0.5
        return q, k, v

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)


class NormedGroups(Rotary):
    """Grouped keys with a norm of each head, after which all heads have one size."""

    def __init__(self):
        super().__init__()
        self.k_proj, self.v_proj = (nn.Linear(C, C // 2, bias=False) for _ in range(2))
        self.q_norm, self.k_norm = (nn.RMSNorm(D) for _ in range(2))

    def place(self, q, k):
        return super().place(self.q_norm(q), self.k_norm(k))

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class NormByDtype(nn.Module):
    """A norm whose eps is that of float32, or else a larger one, as in many models for half precision."""

    def forward(self, x):
        eps = 1e-5 if x.dtype == torch.float32 else 1e-3
        return (x - x.mean(-1, keepdim=True)) * (x.var(-1, unbiased=False, keepdim=True) + eps).rsqrt()


class NormOfOutput(Rotary):
    """Such a norm after the output projection."""

    def __init__(self):
        super().__init__()
        self.norm = NormByDtype()

    def forward(self, x):
        return self.norm(super().forward(x))


ALL = {"expects": Everything()}
TWO = {
    "expects": Everything(),
    "sample": tuple(torch.randn(2, t, C, generator=torch.Generator().manual_seed(t)) for t in (6, 7)),
}
BATCH = torch.randn(2, T, C, generator=torch.Generator().manual_seed(3))
STRIDES = Given((torch.arange(T)[:, None] - torch.arange(T)) % 3 == 0) & Causal()
VARIANTS = [
    (Cross, TWO),
    (DecoderBlock, TWO | {"expects": Causal()}),
    (PaddingBeforeSoftmax, {"expects": Padding((3, 6)), "sample": BATCH}),
    (Strided, {"expects": STRIDES, "sample": BATCH}),
    (Chunked, {"expects": Causal() & Documents([0, 0, 0, 1, 1, 1]), "sample": BATCH}),
    (PrefixModel, {"expects": Prefix(3) | Causal()}),
    (SinksInTheMask, {}),
    (GatedUnit, ALL),
    (TableOfWindow, ALL | {"sample": BATCH}),
    *(
        (make, ALL)
        for make in (RelativeTable, FilledUpAndHidden, RotaryOfGrid, InducedSet, CosineAttention, Convolutional, Registers)
    ),
    *((make, {}) for make in (CacheWithReset, CacheByPosition, BiasBeforeSoftmax, NormalizedHeads, NormedAllHeads)),
    *((make, {}) for make in (LayerNormedHeads, SoftcapStated, SinksBesideScores, Latent, LatentUnabsorbed, ComplexRotary)),
    *((make, {}) for make in (PartialRotary, RotaryTables, RelativeKeys, CausalConvolution, TokenShift, ParallelBlock)),
    *((make, {}) for make in (SandwichNorm, HeadGate, ValueResidual, OtherWidths, FusedByHead, BatchedByBmm, SequenceFirst)),
    *((make, {}) for make in (Baddbmm, ScaledBoth, UpcastSoftmax, ByLogSumExp, SoftmaxModule, Adapted, WeightNormed)),
    *((make, {}) for make in (LogarithmicBias, OneParameter, TokensBeforeHeads, GroupedByEinsum, QueryBlocks, AdditiveMask)),
    *((make, {}) for make in (SharedQueriesAndKeys, HeadsOneByOne, ReturnsRecord, DroppedPath, Bottleneck, Flex, LatentCached)),
    *((make, {}) for make in (Differential, DifferentialOfKernels, LatentFolded, ScaledInPlace, NormOfOutput, NormedGroups)),
]
