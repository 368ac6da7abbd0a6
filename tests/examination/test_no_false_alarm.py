"""Right layers of unusual design are not accused, and what mixes tokens outside of attention is named as the cause."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import regard
from examination.test_conclusive import C, D, H, Heads
from regard import Everything


class ReZero(Heads):
    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return x + self.gate * super().forward(x)


class ModulatedFromZero(Heads):
    def __init__(self):
        super().__init__()
        self.norm, self.modulation = nn.LayerNorm(C, elementwise_affine=False), nn.Linear(C, 3 * C)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def forward(self, x):
        shift, scale, gate = self.modulation(x).chunk(3, -1)
        return x + gate * super().forward(self.norm(x) * (1 + scale) + shift)


@pytest.mark.slow
@pytest.mark.parametrize("make", [ReZero, ModulatedFromZero])
def test_a_branch_that_starts_at_zero_is_no_wrong_mask(make):
    report = regard.examine(make())
    assert not report.findings, str(report)
    assert any("in place of the zeros of" in note for note in report.notes)


class Pooling(Heads):
    """The mean of what all tokens see."""

    def forward(self, x):
        return super().forward(x).mean(1)


class ClassToken(Heads):
    """A token of its own before the others."""

    def __init__(self):
        super().__init__(is_causal=False)
        self.token = nn.Parameter(torch.randn(1, 1, C))

    def forward(self, x):
        return super().forward(torch.cat([self.token.expand(len(x), -1, -1), x], 1))


@pytest.mark.parametrize(("layer", "expects"), [(Pooling(), regard.Causal()), (ClassToken(), Everything())])
def test_a_layer_that_returns_other_tokens_is_examined_in_its_calls(layer, expects):
    for sample in (None, torch.randn(2, 7, C)):
        report = regard.examine(layer, expects=expects, sample=sample)
        assert not report.findings, str(report)
        assert any("that it" not in one.what and "the scale of the scores" in one.what for one in report.checked)
    assert [one.kind for one in regard.examine(Pooling(), expects=Everything()).findings] == ["wrong mask"]


class Mixed(Heads):
    """Something before attention that mixes tokens."""

    def __init__(self, mix):
        super().__init__()
        self.mix = mix

    def forward(self, x):
        return super().forward(self.mix(x.transpose(1, 2)).transpose(1, 2))


class Rolled(nn.Module):
    def forward(self, x):
        return x.roll(1, -1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mix", "says"),
    [
        (nn.Conv1d(C, C, 3, padding=1), "conv1d in mix"),
        (nn.GroupNorm(3, C), "group_norm in mix"),
        (nn.BatchNorm1d(C, track_running_stats=False), "batch_norm in mix"),
        (Rolled(), "roll in mix"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_the_function_that_carries_tokens_back_is_named(mix, says):
    report = regard.examine(Mixed(mix))
    finding = next(one for one in report.findings if one.kind == "future leak")
    assert f"{says} carries tokens back" in finding.evidence
    assert "triu" not in finding.cure


class ByName(Heads):
    """Arguments that are passed by their names alone."""

    def forward(self, *, query, key, value):
        q, k, v = (
            f(x).unflatten(-1, (H, D)).transpose(1, 2)
            for f, x in ((self.q_proj, query), (self.k_proj, key), (self.v_proj, value))
        )
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class WithMask(Heads):
    """A mask that every call passes."""

    def forward(self, x, mask, gain=1.0):
        q, k, v = self.split(x)
        mask = mask[: x.shape[1], : x.shape[1]]
        return gain * self.o_proj(F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2))


MASK = torch.ones(300, 300, dtype=torch.bool).tril()


@pytest.mark.slow
def test_arguments_by_name_and_further_arguments_are_passed():
    assert regard.examine(ByName())
    assert regard.examine(WithMask(), args=(MASK,))
    assert regard.examine(WithMask(), kwargs={"mask": MASK, "gain": 2.0})
    assert not regard.examine(WithMask(), args=(MASK | True,))
    with pytest.raises(regard.ConfigError, match="args are the arguments that follow its input, mask, gain; got 3"):
        regard.examine(WithMask(), args=(MASK, 1.0, 2.0))


class Quantized(nn.Module):
    """A linear layer of int8 in buffers."""

    def __init__(self, plain):
        super().__init__()
        self.in_features = plain.in_features
        step = plain.weight.detach().abs().amax() / 127
        self.register_buffer("weight", (plain.weight.detach() / step).round().to(torch.int8))
        self.register_buffer("step", step)

    def forward(self, x):
        return x @ (self.weight.to(x.dtype) * self.step.to(x.dtype)).T


@pytest.mark.slow
def test_weights_of_int8_in_buffers_are_examined():
    layer = Heads()
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        setattr(layer, name, Quantized(getattr(layer, name)))
    report = regard.examine(layer)
    assert not report.findings, str(report)
    assert f", {C}) float32" in report.notes[1]


def test_pixels_are_examined_in_the_calls_that_they_lead_to():
    class Pictured(Heads):
        def __init__(self):
            super().__init__(is_causal=False)
            self.patches, self.head = nn.Conv2d(3, C, 4, 4), nn.Linear(C, 5)

        def forward(self, pixels):
            return self.head(super().forward(self.patches(pixels).flatten(2).mT).mean(1))

    report = regard.examine(Pictured(), expects=Everything(), sample=torch.randn(2, 3, 16, 16))
    assert report, str(report)
    assert any("in 1 recorded calls" in one.sensitivity for one in report.checked)
    assert not regard.examine(Pictured(), sample=torch.randn(2, 3, 16, 16))
