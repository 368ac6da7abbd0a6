"""The source of queries and keys is found through a constant, several modules, another order, XPos and mixed tokens."""

import pytest
import torch
from torch import nn

import regard
from examination import wrong_calls
from regard import Everything
from regard.examination.call_checks import scale_checks
from regard.examination.call_reading.projection_source import ModuleOutput

B, H, T, D = 2, 3, 7, 4


def draw(*shape, seed=3):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def join(x):
    return ModuleOutput("to_q", x.transpose(1, 2).flatten(2))


def grow(x, rate, sign=1):
    """Rotated halves times ζ ** (sign * n), for a ζ of each pair."""
    n = torch.arange(x.shape[2], dtype=x.dtype)[:, None]
    size, angle = torch.tensor([rate, rate**0.5]).to(x) ** (sign * n), n * torch.tensor([1.0, 0.1]).to(x)
    a, b = x.chunk(2, -1)
    return torch.cat([(a * angle.cos() - b * angle.sin()) * size, (b * angle.cos() + a * angle.sin()) * size], -1)


class Changed(nn.Module):
    """Attention by hand with a scale of its own."""

    def __init__(self, scale=D**-0.5):
        super().__init__()
        torch.manual_seed(1)
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(H * D, H * D, bias=False) for _ in range(4))
        self.factor = scale

    def place(self, q, k, v):
        return q, k, v

    def weigh(self, q, k):
        return (q @ k.mT * self.factor).softmax(-1)

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (H, D)).transpose(1, 2) for f in (self.to_q, self.to_k, self.to_v))
        q, k, v = self.place(q, k, v)
        return self.to_out((self.weigh(q, k) @ v).transpose(1, 2).flatten(2))


class XPos(Changed):
    def place(self, q, k, v):
        return grow(q, 1.02), grow(k, 1.02, -1), v


class ConstantAdded(Changed):
    """A learned constant is added to the queries, as in Transformer-XL and Enformer."""

    def __init__(self, *given):
        super().__init__(*given)
        self.content = nn.Parameter(torch.randn(1, H, 1, D))

    def place(self, q, k, v):
        return q + self.content, k, v


class Shaw(Changed):
    """Scores of queries and of vectors for each distance, as in Shaw et al. 2018."""

    def __init__(self, *given):
        super().__init__(*given)
        self.distances = nn.Embedding(2 * 512 + 1, D)

    def weigh(self, q, k):
        t = q.shape[2]
        steps = torch.arange(t)[:, None] - torch.arange(t)
        beside = torch.einsum("bhnd,nrd->bhnr", q, self.distances(steps + 512)) * self.factor
        return (q @ k.mT * self.factor + beside).softmax(-1)


class Linformed(Changed):
    def __init__(self, *given):
        super().__init__(*given)
        self.first, self.second = (nn.Parameter(torch.randn(6, 5)) for _ in range(2))

    def place(self, q, k, v):
        return q, *(torch.einsum("bhtd,tn->bhnd", x, one[: x.shape[2]]) for x, one in ((k, self.first), (v, self.second)))


class HeadsMixedAfter(Changed):
    """Talking heads after the softmax, with a norm over the heads, as in DeepViT."""

    def __init__(self, *given):
        super().__init__(*given)
        self.norm, self.mixing = nn.LayerNorm(H), nn.Parameter(torch.randn(H, H))

    def weigh(self, q, k):
        mixed = torch.einsum("bhqk,hg->bgqk", super().weigh(q, k), self.mixing)
        return self.norm(mixed.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class HeadsMixedTwice(Changed):
    """Talking heads before and after the softmax, as in CaiT."""

    def __init__(self, *given):
        super().__init__(*given)
        self.mixing = nn.Parameter(torch.randn(H, H))

    def weigh(self, q, k):
        scores = torch.einsum("bhqk,hg->bgqk", q @ k.mT * self.factor, self.mixing)
        return torch.einsum("bhqk,hg->bgqk", scores.softmax(-1), self.mixing.mT)


@pytest.mark.slow
@pytest.mark.parametrize("layer", [XPos, ConstantAdded, Shaw, Linformed, HeadsMixedAfter, HeadsMixedTwice])
def test_a_scale_is_read_through_what_is_done_to_queries_keys_and_weights(layer):
    settings = {"expects": Everything(), "sample": draw(B, 6, H * D).float()}
    report = regard.examine(layer(), **settings)
    assert report, str(report)
    assert any(one.what.startswith(scale_checks.SCALE) for one in report.checked)
    wrong = regard.examine(layer(1 / D), **settings)
    assert "multiplied by 0.25, not by 1 / √4" in " ".join(
        [one.evidence for one in wrong.findings] + [one.what for one in wrong.missing]
    )
    assert not wrong


class Tempered(wrong_calls.Rotary):
    """Queries with a factor of their position after the rotation, as in Llama 4."""

    def __init__(self, factor=1.0):
        super().__init__()
        self.factor = factor

    def place(self, q, k):
        q, k = super().place(q, k)
        return q * (1 + 0.1 * torch.arange(q.shape[2]).div(4).log1p())[:, None] * self.factor, k


class ConvolvedAfterProjections(wrong_calls.Rotary):
    """A causal convolution of each channel after the projections, padded on both sides and cut off at the end."""

    def __init__(self, factor=1.0):
        super().__init__()
        self.factor, width = factor, wrong_calls.C
        self.mix = nn.ModuleList(nn.Conv1d(width, width, 3, groups=width, padding=2) for _ in range(3))

    def split(self, x):
        parts = [
            mix(f(x).mT)[..., : x.shape[1]].mT for f, mix in zip((self.q_proj, self.k_proj, self.v_proj), self.mix, strict=True)
        ]
        q, k, v = (y.unflatten(-1, (-1, wrong_calls.D)).transpose(1, 2) for y in parts)
        return q * self.factor, k, v


@pytest.mark.parametrize(("make", "kinds"), [(Tempered, []), (ConvolvedAfterProjections, ["wrong scale"])])
@pytest.mark.parametrize("factor", [1.0, wrong_calls.D**-0.5])
def test_scales_are_read_through_factors_of_positions_and_convolutions(make, kinds, factor):
    """A first factor other than 1 may be one of the positions: the scale is unknown then."""
    torch.manual_seed(0)
    report = regard.examine(make(factor))
    assert [one.kind for one in report.findings] == ([] if factor == 1 else kinds)
    assert bool(report) == (factor == 1), str(report)
