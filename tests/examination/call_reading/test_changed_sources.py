"""The source of queries and keys is found through a constant, several modules, another order, XPos and mixed tokens."""

import pytest
import torch
from torch import nn

import regard
from examination import wrong_calls
from regard import Everything
from regard.examination.call_checks import scale_checks
from regard.examination.call_reading.changed_sources import find_changed_source, find_decayed_sources, find_mixed_source
from regard.examination.call_reading.projection_source import ModuleOutput

B, H, T, D = 2, 3, 7, 4
NEAR = H * T * D * torch.finfo(torch.float64).eps


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


def test_a_constant_that_is_added_to_each_head_is_seen_through():
    y = draw(B, H, T, D)
    source = find_changed_source(2.5 * y.flip(1) + draw(1, H, 1, D, seed=4), [join(y)])
    assert source.slices == (2, 1, 0)
    assert source.factor == pytest.approx(2.5, rel=NEAR)


def test_numbers_that_differ_from_token_to_token_are_no_constant():
    y = draw(B, H, T, D)
    assert find_changed_source(2.5 * y + draw(1, H, T, D, seed=4), [join(y)]) is None


def test_heads_of_different_modules_are_one_source_if_they_have_one_factor():
    y = draw(B, H, T, D)
    outputs = [ModuleOutput(f"convolutions.{i}", y[:, i].mT) for i in range(H)]  # (b, d, t), as of a convolution
    source = find_changed_source(0.5 * y, outputs)
    assert source.name == "convolutions"
    assert source.slices == tuple(range(H))
    assert source.factor == pytest.approx(0.5, rel=NEAR)
    factors = torch.tensor([0.5, 0.5, 0.7]).to(y).view(H, 1, 1)
    assert find_changed_source(factors * y, outputs) is None


def test_tokens_in_windows_are_found():
    y = draw(B, 4, 6, H * D)  # a grid of 4 x 6 tokens
    windows = y.view(B, 2, 2, 3, 2, H, D).permute(0, 1, 3, 5, 2, 4, 6).reshape(B * 6, H, 4, D)
    source = find_changed_source(3 * windows, [ModuleOutput("to_qkv", torch.cat([y, y + 1], -1))])
    assert source.slices == tuple(range(H))
    assert source.factor == pytest.approx(3, rel=NEAR)


def test_pairs_that_grow_in_queries_and_decay_in_keys_are_seen_through():
    q, k = draw(B, H, T, D), draw(B, 1, T, D, seed=5)
    outputs = [join(q), ModuleOutput("to_k", k[:, 0])]
    found = find_decayed_sources(grow(3 * q, 1.1), grow(k, 1.1, -1), outputs)
    assert [one.name for one in found] == ["to_q", "to_k"]
    assert found[0].factor * found[1].factor == pytest.approx(3, rel=NEAR)
    assert find_decayed_sources(grow(q, 1.1), grow(k, 1.1), outputs) is None
    assert find_decayed_sources(grow(q, 1.1), grow(k, 1.2, -1), outputs) is None


def test_tokens_that_a_parameter_mixed_are_found():
    y, mixing = draw(B, H, T, D), draw(T, 5, seed=5)
    keys = torch.einsum("bhtd,tn->bhnd", y, mixing)
    source = find_mixed_source(0.5 * keys, [join(y)], {"proj_k": mixing, "other": draw(T, 5, seed=6)})
    assert source.factor == pytest.approx(0.5, rel=NEAR)
    assert find_mixed_source(keys, [join(y)], {"other": draw(T, 5, seed=6)}) is None


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


def test_heads_that_are_not_told_from_windows_have_a_source_without_slices():
    y = draw(B, 24, 2 * H * D)
    heads_first = y[..., : H * D].view(B, 6, 4, H, D).permute(0, 3, 1, 2, 4).reshape(B * H, 6, 4, D)
    source = find_changed_source(2 * heads_first, [ModuleOutput("to_qk", y)])
    assert source.slices == ()
    assert source.factor == pytest.approx(2, rel=NEAR)
    assert find_changed_source(y[..., : H * D].reshape(B, H, 24, D), [ModuleOutput("to_qk", y)]) is None  # mixed heads
    assert find_changed_source(heads_first.square(), [ModuleOutput("to_qk", y)]) is None


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
