"""Weights that cannot be trained are found; weights that shall not be are no fault."""

import pytest
import torch
from torch import nn

from examination import right_designs as designs
from examination import wrong_training as wrong
from examination.subjects import D_IN, D_OUT, Layer, case_of, hiding, kinds, later
from regard import Given, Window
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


class NormOfKeysUnused(nn.Module):
    """Norms of queries and of keys, of which that of the keys is not called; its weights may be no Linear's neighbors."""

    def __init__(self, is_inside=True):
        super().__init__()
        self.q, self.k = (nn.Linear(D_IN, D_OUT) for _ in range(2))
        self.q_norm, k_norm = nn.LayerNorm(D_OUT), nn.LayerNorm(D_OUT)
        self.k_norm = k_norm if is_inside else nn.ModuleDict({"k_norm": k_norm})

    def forward(self, x):
        return weigh(self.q_norm(self.q(x)) @ self.k(x).mT / D_OUT**0.5) @ x


def test_a_norm_beside_projections_that_gets_no_gradient_is_named():
    (finding,) = findings(NormOfKeysUnused())
    assert finding.kind == "not trainable"
    assert "k_norm" in finding.evidence


def test_a_part_that_gets_no_gradient_is_not_counted_among_those_that_do():
    (result,) = check_case(case_of(NormOfKeysUnused(is_inside=False).eval()))
    assert "all but those of k_norm.k_norm" in result.what
    assert result.sensitivity.startswith("6 weights")


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


def test_a_joint_projection_is_no_finding_where_all_of_it_is_used_or_each_query_sees_one_key():
    assert findings(Joint(None)) == []

    class Own(Joint):
        def forward(self, x):
            q, k, v = (x @ self.qkv.mT).chunk(3, -1)
            scores = (q @ k.mT).masked_fill(~torch.eye(x.shape[1], dtype=torch.bool), -torch.inf)
            return scores.softmax(-1) @ v

    assert findings(Own(None), expects=Window(0, 0)) == []


class Grouped(nn.Module):
    """Four queries of width 2 for each key and value, by one projection, one part of it cut off."""

    def __init__(self, cut):
        super().__init__()
        torch.manual_seed(0)
        self.cut, self.Wqkv = cut, nn.Linear(D_IN, 12)

    def forward(self, x):
        parts = self.Wqkv(x).split((8, 2, 2), -1)
        q, k, v = (one.detach() if n == self.cut else one for n, one in enumerate(parts))
        heads = q.unflatten(-1, (4, 2)).transpose(1, 2)
        return (weigh(heads @ k.mT[:, None]) @ v[:, None]).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(("cut", "outputs"), [(0, "0 to 7"), (1, "8 to 9")])
def test_a_part_for_grouped_queries_that_gets_no_gradient_is_named(cut, outputs):
    (finding,) = findings(Grouped(cut))
    assert f"outputs {outputs} of the 12 of Wqkv" in finding.evidence
    assert findings(Grouped(None)) == []


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


def test_heads_of_a_joint_projection_are_no_finding_where_all_are_used_or_one_is_pruned():
    assert findings(JointHeads(([0, 1, 2, 3],) * 3)) == []
    assert findings(JointHeads(([0, 1, 2, 3],) * 3, (1.0, 1.0, 0.0, 1.0))) == []


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


def test_heads_that_a_router_may_never_select_cannot_be_determined():
    layer = SelectedHeads(is_routed=True)
    nn.init.constant_(layer.router.bias[2:3], -1e3)
    (result,) = check_case(case_of(layer.eval()))
    assert "outputs 6 to 8 and 30 to 32 and 54 to 56 of the 72 of qkv: whole heads, which router may switch off" in result.what


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_heads_that_a_mask_switches_off_cannot_be_determined(dtype):
    (result,) = check_case(case_of(SelectedHeads(mask=(torch.arange(8) != 2).to(dtype)).eval()))
    assert "whole heads, which head_mask may switch off" in result.what


class LearnedPositions(Layer):
    """A table of positions, of which a call uses the first."""

    def __init__(self):
        super().__init__(weigh)
        self.kv_pos = nn.Parameter(torch.randn(64, D_IN))

    def forward(self, x):
        return super().forward(x + self.kv_pos[: x.shape[1]])


class NamedAfterKeys(nn.Module):
    """A table of biases by distance, in a module whose name is like that of a projection."""

    def __init__(self):
        super().__init__()
        self.kvattn = Layer(self.weigh)
        self.kvattn.table = nn.Embedding(64, 1)

    def weigh(self, scores):
        places = torch.arange(scores.shape[-1])
        return weigh(scores + self.kvattn.table((places[:, None] - places).clamp_min(0))[..., 0])

    def forward(self, x):
        return self.kvattn(x)


class DeadUnit(nn.Module):
    """One of 16 inputs of a joint projection that is always zero."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.before, self.qkv = nn.Linear(D_IN, 16), nn.Linear(16, 48)
        nn.init.constant_(self.before.bias, 9.0)
        nn.init.constant_(self.before.bias[3:4], -99.0)

    def forward(self, x):
        q, k, v = self.qkv(self.before(x).relu()).chunk(3, -1)
        return weigh(q @ k.mT / 4) @ v


class ZeroQueries(Joint):
    """Queries that begin with zeros, so that keys get a gradient from the second step on."""

    def __init__(self):
        super().__init__(None)
        nn.init.zeros_(self.qkv[:D_OUT])


@pytest.mark.parametrize("made", [LearnedPositions, NamedAfterKeys, DeadUnit, ZeroQueries])
def test_rows_without_gradient_of_a_right_layer_are_no_finding(made):
    assert findings(made()) == []


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


def test_what_a_model_holds_for_other_outputs_is_no_finding():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.layers, self.pooler = nn.Embedding(9, D_IN), nn.ModuleList([Layer(weigh)]), nn.Linear(D_IN, D_IN)

        def forward(self, x):
            return self.layers[0](x)

    assert findings(Model()) == []


def test_weights_of_an_argument_that_is_not_given_cannot_be_determined():
    (unknown,) = check_case(case_of(designs.OptionalContext().eval()))
    assert "k_context and v_context" in unknown.what

    class Masked(designs.OptionalContext):
        def forward(self, x, key_padding_mask=None):
            return super().forward(x)

    (finding,) = findings(Masked())
    assert "k_context" in finding.evidence


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_checkpoint_that_takes_only_one_way_back_is_no_finding():
    (checked,) = check_case(case_of(designs.Checkpointed().eval()))
    assert checked.sensitivity == "4 weights"


def test_weights_that_were_made_in_inference_mode_cannot_be_determined():
    with torch.inference_mode():
        layer = Layer(weigh)
    (unknown,) = check_case(case_of(layer))
    assert "inference_mode" in unknown.needs


def test_gradients_that_were_there_stay():
    layer = Layer(weigh)
    layer.W_query.weight.grad = torch.ones_like(layer.W_query.weight)
    said = list(check_case(case_of(layer)))
    assert kinds(said) == []
    assert torch.equal(layer.W_query.weight.grad, torch.ones_like(layer.W_query.weight))
    assert layer.W_key.weight.grad is None
