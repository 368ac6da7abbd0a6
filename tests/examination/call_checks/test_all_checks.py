"""Heads of queries meet keys of their own place or group; queries, keys and values come from the projections of their names."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from regard import examine

H, D = 4, 5


class Heads(nn.Module):
    """Causal heads, of which `change` may exchange queries, keys and values (b, h or g, t, d) before keys are shared."""

    def __init__(self, change, groups=H):
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(H * D, H * D), nn.Linear(H * D, H * D)
        self.k_proj, self.v_proj = nn.Linear(H * D, groups * D), nn.Linear(H * D, groups * D)
        self.change = change

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (-1, D)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = self.change(q, k, v)
        k, v = (y.repeat_interleave(H // y.shape[1], 1) for y in (k, v))
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        weights = (q @ k.mT / D**0.5).masked_fill(hidden, -torch.inf).softmax(-1)
        return self.o_proj((weights @ v).transpose(1, 2).flatten(2))


def examine_new(*args, residual=False):
    torch.manual_seed(0)
    layer = Heads(*args)
    return examine(Residual(layer) if residual else layer)


class Residual(nn.Module):
    """A layer with a norm before it and a residual around it, whose formula is read in its calls."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.norm = layer, nn.LayerNorm(H * D)

    def forward(self, x):
        return x + self.layer(self.norm(x))


@pytest.mark.slow
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("groups", [4, 2, 1])
def test_heads_in_their_order_are_right_in_groups_of_any_size(groups, residual):
    assert examine_new(lambda q, k, v: (q, k, v), groups, residual=residual)


@pytest.mark.slow
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(
    ("change", "groups", "said"),
    [
        (lambda q, k, v: (q.flip(1), k, v), 4, "head 0 of the queries is part 3 of"),
        (lambda q, k, v: (q.roll(1, 1), k, v), 4, "head 0 of the queries is part 3 of"),
        (lambda q, k, v: (q.flip(1), k, v), 2, "head 0 of the queries is part 3 of"),
        (lambda q, k, v: (q[:, [0, 2, 1, 3]], k, v), 2, "head 1 of the queries is part 2 of"),
        (lambda q, k, v: (q, k, v.roll(1, 1)), 4, "head 0 of the values is part 3 of"),
    ],
)
def test_heads_that_meet_those_of_another_place_are_mixed(change, groups, said, residual):
    (finding,) = examine_new(change, groups, residual=residual).findings
    assert finding.kind == "mixed heads"
    assert said in finding.evidence


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kv_proj", "key_value", "k_v_proj"])
@pytest.mark.parametrize("groups", [2, 4])
def test_keys_and_values_of_one_projection_are_no_unused_heads(name, groups):
    class Joint(nn.Module):
        def __init__(self):
            super().__init__()
            self.q_proj, self.o_proj = nn.Linear(24, 24), nn.Linear(24, 24)
            setattr(self, name, nn.Linear(24, 2 * groups * 6))

        def forward(self, x):
            b, t, _ = x.shape
            q = self.q_proj(x).view(b, t, 4, 6).transpose(1, 2)
            k, v = getattr(self, name)(x).view(b, t, 2, groups, 6).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=groups != 4)
            return self.o_proj(y.transpose(1, 2).flatten(2))

    assert not examine(Joint()).findings


@pytest.mark.slow
@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_gate_from_the_projection_of_queries_is_no_unused_heads(is_chunked, groups):
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.q_proj, self.o_proj = nn.Linear(24, 48), nn.Linear(24, 24)
            self.k_proj, self.v_proj = nn.Linear(24, groups * 6), nn.Linear(24, groups * 6)

        def forward(self, x):
            b, t, _ = x.shape
            made = self.q_proj(x)
            q, gate = made.view(b, t, 4, 12).chunk(2, -1) if is_chunked else made.view(b, t, 2, 4, 6).unbind(2)
            k, v = (one(x).view(b, t, groups, 6).transpose(1, 2) for one in (self.k_proj, self.v_proj))
            y = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, is_causal=True, enable_gqa=groups != 4)
            return self.o_proj((y.transpose(1, 2) * gate.sigmoid()).flatten(2))

    assert not examine(Gated()).findings


class Averaged(Heads):
    """The mean over the heads of contexts, of values or of weights, in the place of each."""

    def __init__(self, what):
        super().__init__(None)
        self.what = what

    def forward(self, x):
        def average(y, what):
            return y.mean(1, keepdim=True).expand_as(y) if what == self.what else y

        q, k, v = (f(x).unflatten(-1, (-1, D)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        weights = (q @ k.mT / D**0.5).masked_fill(hidden, -torch.inf).softmax(-1)
        context = average(average(weights, "weights") @ average(v, "values"), "contexts")
        return self.o_proj(context.transpose(1, 2).flatten(2))


@pytest.mark.slow
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("what", ["contexts", "values", "weights"])
def test_a_mean_over_heads_in_the_place_of_each_is_no_independence(what, residual):
    torch.manual_seed(0)
    report = examine(Residual(Averaged(what)) if residual else Averaged(what))
    assert not any("heads are independent" in one.what for one in report.checked), str(report)
    if what == "contexts":
        assert report.findings[0].kind == "mixed heads"
        assert "the columns of" in report.findings[0].evidence
        assert "of each head get the mean of the contexts of all heads" in report.findings[0].evidence


class Tempered(Heads):
    """Scores times a learned temperature, one for all or one for each head, and a `factor` of no parameter."""

    def __init__(self, sizes, temperature, factor):
        super().__init__(lambda q, k, v: (q * self.temperature * factor, k, v))
        self.temperature, self.norm = nn.Parameter(torch.full(sizes, temperature)), nn.LayerNorm(H * D)

    def forward(self, x):
        return super().forward(self.norm(x))


@pytest.mark.parametrize("sizes", [(), (1,), (H, 1, 1)])
def test_a_learned_temperature_is_no_wrong_scale_and_another_factor_is_one(sizes):
    torch.manual_seed(0)
    assert not examine(Tempered(sizes, 1.3, 1.0)).findings
    for temperature, factor in ((1.3, D**-0.5), (1.0, 1.3)):
        assert "wrong scale" in [one.kind for one in examine(Tempered(sizes, temperature, factor)).findings]


@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("letters", ["k", "v", "kv"])
def test_grouped_heads_of_a_view_without_a_transpose_are_named_first(letters, groups):
    def view(y):
        return y.transpose(1, 2).reshape(y.shape)

    def change(q, k, v):
        return q, *(view(y) if letter in letters else y for letter, y in zip("kv", (k, v), strict=True))

    (finding, *_) = examine_new(change, groups, residual=True).findings
    assert finding.kind == "mixed heads"
    assert f"{' and '.join(letters)} are split into heads by a view without a transpose" in finding.evidence
