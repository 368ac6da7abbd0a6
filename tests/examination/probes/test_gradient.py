"""Weights that cannot be trained are found; weights that shall not be are no fault."""

import pytest
import torch
from torch import nn

from examination import wrong_training as wrong
from examination.subjects import D_IN, D_OUT, Layer, case_of, hiding, later
from regard import Given
from regard.examination.probes.gradient import check_case

weigh = hiding(later)


def findings(layer, **told):
    return [one for one in check_case(case_of(layer.eval(), **told)) if hasattr(one, "kind")]


@pytest.mark.parametrize(
    ("made", "names"),
    [
        (wrong.Detached, ("query and key",)),
        (wrong.WithoutGradient, ("query", "key and value")),
        (wrong.WeightData, ("query",)),
        (wrong.OutputUnused, ("gate",)),
        (wrong.HeadsInAList, ("heads",)),
    ],
)
def test_a_weight_that_gets_no_gradient_is_named(made, names):
    (finding,) = findings(made())
    assert finding.kind == "not trainable"
    assert all(name in finding.evidence for name in names)


class Joint(nn.Module):
    """Queries, keys and values by one projection, of which one may be cut off from its gradient."""

    def __init__(self, cut, is_transposed=False):
        super().__init__()
        self.cut, self.is_transposed = cut, is_transposed
        self.qkv = nn.Parameter(torch.randn((D_IN, 3 * D_OUT) if is_transposed else (3 * D_OUT, D_IN)) / D_IN**0.5)

    def forward(self, x):
        parts = (x @ (self.qkv if self.is_transposed else self.qkv.mT)).chunk(3, -1)
        q, k, v = (one.detach() if n == self.cut else one for n, one in enumerate(parts))
        return weigh(q @ k.mT / D_OUT**0.5) @ v


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("cut", [0, 1, 2])
def test_a_part_of_a_joint_projection_that_gets_no_gradient_is_named(cut, is_transposed):
    (finding,) = findings(Joint(cut, is_transposed))
    assert finding.kind == "not trainable"
    assert f"outputs {cut * D_OUT} to {cut * D_OUT + D_OUT - 1} of the {3 * D_OUT} of qkv" in finding.evidence


class JointHeads(nn.Module):
    """Four heads of width 3 by one projection, of which some are used for queries, keys and values, with a factor on each."""

    def __init__(self, used, factors=(1.0, 1.0, 1.0, 1.0)):
        super().__init__()
        torch.manual_seed(0)
        self.used, self.qkv, self.proj = used, nn.Linear(D_IN, 36), nn.Linear(3 * len(used[0]), D_IN)
        with torch.no_grad():
            self.proj.weight.mul_(torch.tensor(factors[: len(used[0])]).repeat_interleave(3))

    def forward(self, x):
        parts = self.qkv(x).unflatten(-1, (3, 4, 3)).permute(2, 0, 3, 1, 4)
        q, k, v = (part[:, heads] for part, heads in zip(parts, self.used, strict=True))
        return x + self.proj((weigh(q @ k.mT / 3**0.5) @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    ("used", "outputs"),
    [
        (([0, 1, 2],) * 3, "9 to 11 and 21 to 23 and 33 to 35"),
        (([0, 1, 2, 3], [0] * 4, [0, 1, 2, 3]), "15 to 23"),
        (([0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 0, 1]), "30 to 35"),
    ],
)
def test_heads_of_a_joint_projection_that_nothing_uses_are_named(used, outputs):
    (finding,) = findings(JointHeads(used))
    assert finding.kind == "not trainable"
    assert f"outputs {outputs} of the 36 of qkv: whole heads, which are not used" in finding.evidence


class SeparateHeads(nn.Module):
    """Four heads of width 3, or two of keys and values, by a projection each; the contexts of some are set to 0."""

    def __init__(self, used, groups=4):
        super().__init__()
        torch.manual_seed(0)
        self.used = used
        self.q_proj, self.o_proj = nn.Linear(D_IN, 12), nn.Linear(12, D_IN)
        self.k_proj, self.v_proj = (nn.Linear(D_IN, 3 * groups) for _ in range(2))

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (-1, 3)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        k, v = (one.repeat_interleave(4 // one.shape[1], 1) for one in (k, v))
        context = (weigh(q @ k.mT / 3**0.5) @ v).where(torch.tensor(self.used)[:, None, None], torch.zeros((), dtype=x.dtype))
        return x + self.o_proj(context.transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    ("used", "groups", "outputs"),
    [
        ((True, True, True, False), 4, "9 to 11 of the 12 of q_proj"),
        ((True, False, True, False), 4, "3 to 5 and 9 to 11 of the 12 of q_proj"),
        ((True, True, False, False), 2, "6 to 11 of the 12 of q_proj"),
    ],
)
def test_heads_of_separate_projections_that_nothing_uses_are_named(used, groups, outputs):
    (finding,) = findings(SeparateHeads(used, groups))
    assert finding.kind == "not trainable"
    assert f"outputs {outputs}: whole heads, which are not used" in finding.evidence
    assert findings(SeparateHeads((True,) * 4, groups)) == []


class SelectedHeads(JointHeads):
    """Eight heads by one projection, times a factor of each: a mask of them, or of each token, which uses one head."""

    def __init__(self, seed=0, mask=None, is_routed=False, is_raw=False):
        super().__init__(([0, 1, 2, 3],) * 3)
        torch.manual_seed(seed)
        self.qkv, self.proj = nn.Linear(D_IN, 72), nn.Linear(24, D_IN)
        self.is_raw = is_raw
        self.router = None if not is_routed else nn.Parameter(torch.randn(D_IN, 8)) if is_raw else nn.Linear(D_IN, 8)
        self.register_buffer("head_mask", mask)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 8, 3)).permute(2, 0, 3, 1, 4)
        heads = (weigh(q @ k.mT / 3**0.5) @ v).transpose(1, 2)
        if self.head_mask is not None:
            heads = heads * self.head_mask[:, None]
        if self.router is not None:
            share = (x @ self.router if self.is_raw else self.router(x)).softmax(-1)
            heads = heads * (share * (share == share.amax(-1, keepdim=True)))[..., None]
        return x + self.proj(heads.flatten(2))


@pytest.mark.parametrize("is_raw", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_heads_that_a_router_selects_are_no_finding(seed, is_raw):
    assert findings(SelectedHeads(seed, is_routed=True, is_raw=is_raw)) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_heads_that_a_mask_switches_off_cannot_be_determined(dtype):
    (result,) = check_case(case_of(SelectedHeads(mask=(torch.arange(8) != 2).to(dtype)).eval()))
    assert "whole heads, which head_mask may switch off" in result.what


def test_a_layer_without_any_gradient_is_found():
    class Nothing(Layer):
        @torch.no_grad()
        def forward(self, x):
            return super().forward(x)

    (finding,) = findings(Nothing(weigh))
    assert "3 weights" in finding.evidence


def test_a_gradient_of_nan_is_found_where_outputs_are_numbers():
    rows = torch.arange(6) < torch.tensor([3, 6])[:, None]
    between = Given((rows[:, :, None] & rows[:, None, :]).unsqueeze(1))
    (finding,) = findings(wrong.GradientOfNothing(), expects=between, sample=torch.randn(2, 6, wrong.C))
    assert "NaN" in finding.evidence


def test_a_tensor_that_is_no_parameter_is_found():
    layer = Layer(weigh)
    layer.scaling = [torch.ones(D_OUT, requires_grad=True)]
    (finding,) = findings(layer)
    assert "scaling" in finding.evidence


def test_frozen_weights_are_no_finding():
    layer = Layer(weigh).requires_grad_(False)
    layer.W_value.requires_grad_(True)
    assert findings(layer) == []
    assert findings(layer.requires_grad_(False)) == []


def test_an_output_that_begins_with_zeros_is_no_finding():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.output = Layer(weigh), nn.Linear(D_OUT, D_IN)
            nn.init.zeros_(self.output.weight)

        def forward(self, x):
            return x + self.output(self.attention(x))

    assert findings(Residual()) == []
