"""Changed linear attention equals its dense matrix with heads or entries left out, whatever divides its rows."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from observe.recording_checks import EQUAL, assert_equal
from regard import CutEdges, KnockOut, Patch, Temperature, intervene, record

pytestmark = pytest.mark.usefixtures("in_float64")
B, H, T, D = 2, 3, 13, 5
C = H * D


def divide(q, k, v):
    return q @ (k.mT @ v) / (q @ k.sum(2, keepdim=True).mT)


def add_a_column_of_ones(q, k, v):
    context = q @ (k.mT @ F.pad(v, (0, 1), value=1.0))
    return context[..., :-1] / context[..., -1:]


def keep(q, k, v):
    return q @ (k.mT @ v) / T


def multiply_scores_first(q, k, v):
    return (q @ k.mT) @ v / T


def add_up(q, k, v):
    states = torch.einsum("bhtd,bhte->bhtde", k, v).cumsum(2)
    return torch.einsum("bhtd,bhtde->bhte", q, states)


def divide_causal(q, k, v):
    return add_up(q, k, v) / ((q * k.cumsum(2)).sum(-1, keepdim=True) + 1e-3)


def multiply_by_inverse(q, k, v):
    """As fast-transformers does. https://arxiv.org/abs/2006.16236"""
    inverse = 1 / (torch.einsum("bhtd,bhd->bht", q, k.sum(2)) + 1e-3)
    return torch.einsum("bhtd,bhde,bht->bhte", q, torch.einsum("bhtd,bhte->bhde", k, v), inverse)


def divide_and_gate(q, k, v):
    return divide(q, k, v) * v.mean(-1, keepdim=True).sigmoid()


def clamp(q, k, v):
    return q @ (k.mT @ v) / (q @ k.sum(2, keepdim=True).mT).clamp(min=1e-3)


def weigh(q, k, visible, added=0.0):
    weights = (q @ k.mT) * visible
    return (weights / (weights.sum(-1, keepdim=True) + added)).nan_to_num(0)


FORMS = {  # name: context of q, k and v, and its dense matrix of q, k, v and visible entries
    "divided by the sums": (divide, lambda q, k, v, visible: weigh(q, k, visible)),
    "divided by a column of ones": (add_a_column_of_ones, lambda q, k, v, visible: weigh(q, k, visible)),
    "causal, divided by sums apart": (divide_causal, lambda q, k, v, visible: weigh(q, k, visible.tril(), 1e-3)),
    "multiplied by one over the sums": (multiply_by_inverse, lambda q, k, v, visible: weigh(q, k, visible, 1e-3)),
    "divided and gated": (
        divide_and_gate,
        lambda q, k, v, visible: weigh(q, k, visible) * v.mean(-1, keepdim=True).sigmoid(),
    ),
    "over the length": (keep, lambda q, k, v, visible: (q @ k.mT) * visible / T),
    "scores first": (multiply_scores_first, lambda q, k, v, visible: (q @ k.mT) * visible / T),
    "causal": (add_up, lambda q, k, v, visible: (q @ k.mT) * visible.tril()),
}


class Linear(nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.project, self.attend = nn.Linear(C, 3 * C), attend

    def split(self, x):
        q, k, v = self.project(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
        return F.elu(q) + 1, F.elu(k) + 1, v

    def forward(self, x):
        return self.attend(*self.split(x)).transpose(1, 2).flatten(2)


def build(name):
    torch.manual_seed(5)
    return nn.Sequential(Linear(FORMS[name][0]), nn.Linear(C, C)).eval(), torch.randn(B, T, C)


def compute(model, x, name, visible=True, heads=(0, 1, 2)):
    """The output with entries that are not visible left out of the matrix, and with some heads alone."""
    q, k, v = model[0].split(x)
    context = FORMS[name][1](q, k, v, torch.as_tensor(visible).expand(H, T, T)) @ v
    mask = torch.zeros(H, 1, 1).index_fill(0, torch.tensor(heads), 1)
    return model[1]((context * mask).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("name", FORMS)
def test_a_head_knocked_out_has_an_output_of_zero(name):
    model, x = build(name)
    assert_equal(model(x), compute(model, x, name))
    with intervene(model, KnockOut(0, 1, kind="implicit")), record(model) as recording:
        assert_equal(model(x), compute(model, x, name, heads=(0, 2)))
    assert not recording.missed
    assert recording.map(0, kind="implicit").certificate().error < EQUAL  # the matrix is that of the layer itself


@pytest.mark.parametrize("heads", [None, [0, 2]], ids=str)
@pytest.mark.parametrize("name", FORMS)
def test_cut_entries_are_left_out_of_the_matrix_with_gradients(name, heads):
    model, x = build(name)
    visible, x = torch.ones(H, T, T, dtype=torch.bool), x.requires_grad_()
    visible[slice(None) if heads is None else heads, 4:9, 3] = False
    expected = compute(model, x, name, visible)
    with intervene(model, CutEdges(slice(4, 9), 3, layer=0, head=heads, kind="implicit")), record(model) as recording:
        found = model(x)
    assert_equal(found, expected)
    assert not torch.allclose(found, model(x))
    one, other = (torch.autograd.grad(y.square().sum(), [x, model[0].project.weight]) for y in (found, expected))
    for own, theirs in zip(one, other, strict=True):
        assert_equal(own, theirs)
    assert recording.map(0, kind="implicit").certificate().error < EQUAL


@pytest.mark.parametrize("is_out_inside", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_entries_that_two_blocks_cut_and_heads_that_one_takes_out_are_left_out_once(name, is_out_inside):
    model, x = build(name)
    visible = torch.ones(H, T, T, dtype=torch.bool)
    visible[:, 4:9, [1, 3]] = False
    blocks = [[CutEdges(slice(4, 9), [1, 3], kind="implicit")], [KnockOut(0, 1, kind="implicit")]]
    blocks[1].append(CutEdges(slice(4, 9), 3, kind="implicit"))
    outer, inner = blocks if is_out_inside else blocks[::-1]
    with intervene(model, *outer), intervene(model, *inner):
        assert_equal(model(x), compute(model, x, name, visible, heads=(0, 2)))


@pytest.mark.parametrize("name", FORMS)
def test_a_change_that_changes_nothing_leaves_every_bit(name):
    model, x = build(name)
    expected = model(x)
    for change in (CutEdges([], [], kind="implicit"), KnockOut(head=[], kind="implicit")):
        with intervene(model, change):
            assert torch.equal(model(x), expected)


@pytest.mark.parametrize("name", FORMS)
def test_a_query_without_keys_has_an_output_of_zero(name):
    model, x = build(name)
    visible = torch.ones(H, T, T, dtype=torch.bool)
    visible[:, 5] = False
    with intervene(model, CutEdges(5, kind="implicit")):
        assert_equal(model(x), compute(model, x, name, visible))


@pytest.mark.parametrize("name", FORMS)
def test_heads_are_replaced_after_the_division(name):
    model, x = build(name)
    with record(model, keep="values") as source, torch.no_grad():
        model(x.flip(0, 1))
    (q, k, v), (other_q, other_k, other) = model[0].split(x), model[0].split(x.flip(0, 1))
    visible = torch.ones(H, T, T, dtype=torch.bool)
    context, weights = FORMS[name][0](q, k, v), FORMS[name][1](other_q, other_k, other, visible)
    own = (torch.arange(H) == 1).view(H, 1, 1)
    for change, new in (
        (KnockOut(0, 1, "mean", kind="implicit"), context.mean(0, keepdim=True)),
        (KnockOut(0, 1, "resample", kind="implicit"), context.roll(1, 0)),
        (Patch(recording=source, layer=0, head=1, of="output", kind="implicit"), weights @ other),
        (Patch(recording=source, layer=0, head=1, kind="implicit"), weights @ v),
    ):
        expected = model[1](torch.where(own, new, context).transpose(1, 2).flatten(2))
        with intervene(model, change):
            assert_equal(model(x), expected)


def test_sums_with_a_bound_follow_while_they_are_larger_than_all_before():
    FORMS["clamped"] = clamp, lambda q, k, v, visible: weigh(q, k, visible)
    try:
        model, x = build("clamped")
        visible, sums = torch.ones(H, T, T, dtype=torch.bool), torch.ones(T)
        q, k, _ = model[0].split(x)
        sums = (q @ k.sum(2, keepdim=True).mT).squeeze(-1)
        most = int(sums.amin((0, 1)).argmax())
        visible[:, most, 0] = False
        assert (((q @ k.mT) * visible).sum(-1)[:, :, most] > sums.min()).all()
        with intervene(model, CutEdges(most, 0, kind="implicit")):
            assert_equal(model(x), compute(model, x, "clamped", visible))
        with (
            pytest.warns(UserWarning, match="not changed: what its rows are multiplied by"),
            intervene(model, CutEdges(4, slice(1, None), kind="implicit")),
        ):
            model(x)
    finally:
        del FORMS["clamped"]


def normalize(q, k, v):
    context = divide(q, k, v)
    return context / context.norm(dim=-1, keepdim=True)


def bound(q, k, v):
    return q @ (k.mT @ v) / (q @ k.sum(2, keepdim=True).mT).abs().clamp(min=30.0)


def test_a_norm_follows_what_changes_and_another_divisor_is_warned_of():
    model, x = build("divided by the sums")
    model[0].attend = normalize
    q, k, v = model[0].split(x)
    visible = torch.ones(H, T, T, dtype=torch.bool)
    visible[:, 4:9, 3] = False
    context = weigh(q, k, visible) @ v
    expected = model[1]((context / context.norm(dim=-1, keepdim=True)).transpose(1, 2).flatten(2))
    with intervene(model, CutEdges(slice(4, 9), 3, kind="implicit")):
        assert_equal(model(x), expected)
    model[0].attend = bound
    with (
        pytest.warns(UserWarning, match="not changed: what its rows are multiplied by"),
        intervene(model, CutEdges(slice(4, 9), 3, kind="implicit")),
    ):
        model(x)


def test_a_temperature_is_warned_of():
    model, x = build("divided by the sums")
    with (
        pytest.warns(UserWarning, match="was not applied: .*it has no scores that a temperature divides"),
        intervene(model, Temperature(t=2.0, kind="implicit")),
    ):
        assert_equal(model(x), compute(model, x, "divided by the sums"))
