"""Changed differential attention that subtracts contexts equals both softmaxes without the keys, or the heads left out."""

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from transformers.models.diffllama import modeling_diffllama

from observe.recording_checks import EQUAL, assert_equal
from observe.test_intervene_recurrences import find_cache
from observe.test_subtracted_contexts import JOINED, B, Subtracts, T, make_diffllama
from regard import CutEdges, KnockOut, Patch, Temperature, intervene, record

pytestmark = pytest.mark.usefixtures("in_float64")
QUERIES, KEYS = [3, 5, 6], [1, 3]
HIDDEN = torch.zeros(T, T, dtype=torch.bool).index_put((torch.tensor(QUERIES)[:, None], torch.tensor(KEYS)), torch.tensor(True))


class WrittenOut(Subtracts):
    """The same with both softmaxes written out: hidden (h, q, k) are taken out of them, scores are divided by t."""

    hidden, t = torch.zeros(2, T, T, dtype=torch.bool), torch.ones(2, 1, 1)

    def forward(self, x):
        q, k = (f(x).unflatten(-1, (2, 2, -1)).permute(2, 0, 3, 1, 4) for f in (self.q_proj, self.k_proj))
        v = self.v_proj(x).unflatten(-1, (2, -1)).transpose(1, 2)
        seen = torch.ones(T, T, dtype=torch.bool).tril() & ~self.hidden
        scores = (a @ b.mT / math.sqrt(a.shape[-1]) / self.t for a, b in zip(q, k, strict=True))
        contexts = [one.masked_fill(~seen, -torch.inf).softmax(-1) @ v for one in scores]
        output = self.change(self.join(*contexts, self.get_lambda(), v))
        return self.o_proj(output.transpose(1, 2).flatten(2))

    def change(self, output):
        return output


def build(name):
    torch.manual_seed(0)
    model, other = Subtracts(JOINED[name]), WrittenOut(JOINED[name])
    other.load_state_dict(model.state_dict())
    return model, other, torch.randn(B, T, model.q_proj.in_features)


def list_gradients(output, model, x):
    return torch.autograd.grad(output.square().sum(), [x, *model.parameters()], allow_unused=True)


IN_PLACE = ("in place", "by an operator in place")  # of what their own backward needs
NUMBERS = ("with alpha", "extrapolated")  # factors that are no tensors, of which there are no gradients


@pytest.mark.parametrize("name", [one for one in JOINED if one not in IN_PLACE + NUMBERS])
def test_edges_and_scores_of_both_softmaxes_change_with_gradients(name):
    model, other, x = build(name)
    x = x.requires_grad_()
    other.hidden, other.t = HIDDEN & (torch.arange(2) == 1).view(2, 1, 1), torch.tensor([2.5, 1]).view(2, 1, 1)
    expected, plain = other(x), model(x)
    changes = CutEdges(QUERIES, KEYS, layer=0, head=1, kind="implicit"), Temperature(0, 0, 2.5, kind="implicit")
    with intervene(model, *changes), record(model) as recording:
        found = model(x)
    assert_equal(found, expected)
    assert not torch.allclose(found, plain)
    assert (recording.map(0, kind="implicit").dense()[:, 1][:, HIDDEN] == 0).all()
    assert not recording.missed
    for own, theirs in zip(list_gradients(found, model, x), list_gradients(expected, other, x), strict=True):
        assert (own is None) == (theirs is None)
        assert own is None or (own - theirs).abs().max() < EQUAL * max(1, theirs.abs().max())


@torch.no_grad()
@pytest.mark.parametrize("name", IN_PLACE + NUMBERS)
def test_edges_of_both_softmaxes_are_cut_without_gradients(name):
    model, other, x = build(name)
    other.hidden = HIDDEN & torch.ones(2, 1, 1, dtype=torch.bool)
    with intervene(model, CutEdges(QUERIES, KEYS, kind="implicit")):
        assert_equal(model(x), other(x))


@torch.no_grad()
@pytest.mark.parametrize("name", ["subtracted", "in place", "of merged heads", "in another layout"])
def test_heads_of_the_difference_are_replaced(name):
    model, other, x = build(name)
    with record(model, keep="values") as source:
        model(x.flip(0))
    weights = source.map(0, kind="implicit").dense()
    v = model.v_proj(x).unflatten(-1, (2, -1)).transpose(1, 2)
    for change, compute in (
        (KnockOut(0, 1, kind="implicit"), torch.zeros_like),
        (KnockOut(0, 1, "mean", kind="implicit"), lambda output: output.mean(0, keepdim=True)),
        (Patch(recording=source, layer=0, head=1, of="output", kind="implicit"), lambda output: output.flip(0)),
        (Patch(recording=source, layer=0, head=1, kind="implicit"), lambda output: weights @ v),
    ):
        other.change = lambda output, compute=compute: torch.where(
            (torch.arange(2) == 1).view(2, 1, 1), compute(output), output
        )
        with intervene(model, change):
            assert_equal(model(x), other(x))


@torch.no_grad()
@pytest.mark.parametrize("name", JOINED)
def test_a_change_that_changes_nothing_leaves_every_bit(name):
    model, _, x = build(name)
    plain = model(x)
    for change in (CutEdges([], [], kind="implicit"), KnockOut(head=[], kind="implicit"), Temperature(kind="implicit")):
        with intervene(model, change):
            assert torch.equal(model(x), plain)


def attend_without(hidden):
    """The attention of transformers without some edges, which are by position in the sequence."""

    def attend(module, query, key, value, attention_mask, scaling, dropout=0.0, **_):
        k, v = (modeling_diffllama.repeat_kv(x, module.num_key_value_groups) for x in (key, value))
        n, past = query.shape[2], key.shape[2] - query.shape[2]
        seen = torch.ones(key.shape[2], key.shape[2], dtype=torch.bool).tril()[past:]
        seen = seen & ~F.pad(hidden, (0, 16, 0, 16))[past : past + n, : key.shape[2]] if module.layer_idx == 0 else seen
        weights = (query @ k.mT * scaling).masked_fill(~seen, -torch.inf).softmax(-1)
        return (weights @ v).transpose(1, 2), weights

    return attend


@torch.no_grad()
def test_edges_of_diffllama_are_cut_in_both_softmaxes_also_in_steps(monkeypatch):
    model, ids = make_diffllama(), torch.randint(0, 64, (B, T))
    change = CutEdges(QUERIES, KEYS, layer=0, kind="implicit")
    plain = model(ids).logits
    with intervene(model, change):
        found = model(ids).logits
        cache, steps = {}, []
        for part in ids.split([4, 1, 1, 1], 1):
            output = model(part, use_cache=True, **cache)
            cache = find_cache(model, output)
            steps.append(output.logits)
    monkeypatch.setitem(modeling_diffllama.ALL_ATTENTION_FUNCTIONS, "sdpa", attend_without(HIDDEN))
    expected = model(ids).logits
    assert (found - expected).abs().max() < 1e-5  # lambda is of float32
    assert (torch.cat(steps, 1) - expected).abs().max() < 1e-5
    assert (found - plain).abs().max() > 1e-2


@torch.no_grad()
def test_a_difference_of_changed_softmaxes_stays_and_says_why():
    model, _, x = build("subtracted")
    changes = CutEdges(QUERIES, KEYS), KnockOut(0, 1, kind="implicit")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with intervene(model, *changes):
            found = model(x)
    assert any("KnockOut of layer 0 was not applied" in str(one.message) and "or a change" in str(one.message) for one in said)
    with pytest.warns(UserWarning, match="calls attention several times"), intervene(model, changes[0]):
        assert torch.equal(model(x), found)
