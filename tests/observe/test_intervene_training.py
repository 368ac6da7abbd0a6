"""Interventions in training and in threads: checkpoints and dropout, compared with a model whose code has the change."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from observe.recording_checks import EQUAL
from regard import CutEdges, KnockOut, Temperature, intervene

pytestmark = pytest.mark.usefixtures("in_float64")
B, H, T, D = 2, 3, 7, 5
C = H * D
HIDDEN = torch.zeros(T, T, dtype=torch.bool)
HIDDEN[3, [1, 2]] = True


class Attention(nn.Module):
    """Attention by a kernel or written out, some of whose keys may be hidden."""

    def __init__(self, kernel, p=0.0):
        super().__init__()
        self.project, self.out, self.kernel, self.p = nn.Linear(C, 3 * C), nn.Linear(C, C), kernel, p

    def forward(self, x, hidden=None):
        q, k, v = self.project(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
        p = self.p if self.training else 0.0
        if self.kernel:
            context = F.scaled_dot_product_attention(q, k, v, None if hidden is None else ~hidden, dropout_p=p)
        else:
            scores = q @ k.mT / D**0.5
            scores = scores if hidden is None else scores.masked_fill(hidden, -math.inf)
            context = F.dropout(scores.softmax(-1), p) @ v
        return self.out(context.transpose(1, 2).flatten(2))


class Checkpointed(nn.Module):
    """Two layers in checkpoints."""

    def __init__(self, kernel, reentrant):
        super().__init__()
        self.layers, self.reentrant = nn.ModuleList(Attention(kernel) for _ in range(2)), reentrant

    def forward(self, x, hidden=(None, None)):
        for layer, one in zip(self.layers, hidden, strict=True):
            x = x + checkpoint(layer, x, one, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("ends_first", [True, False], ids=["backward after the block", "backward in the block"])
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "by hand"])
def test_gradients_of_checkpoints_are_those_of_the_changed_model(kernel, reentrant, ends_first):
    model, x = Checkpointed(kernel, reentrant), torch.randn(B, T, C, requires_grad=True)

    def differentiate(y):
        model.zero_grad()
        x.grad = None
        y.square().sum().backward()
        return [x.grad, *(one.grad for one in model.parameters())]

    expected = model(x, (None, HIDDEN))
    theirs = differentiate(expected)
    with intervene(model, CutEdges(queries=3, keys=[1, 2], layer=1)):
        found = model(x)
        ours = None if ends_first else differentiate(found)
    torch.testing.assert_close(found, expected, rtol=0, atol=EQUAL)
    torch.testing.assert_close(ours or differentiate(found), theirs, rtol=1e-10, atol=EQUAL)


def test_a_kernel_drops_the_weights_that_it_drops_in_the_changed_model():
    model, x = nn.Sequential(Attention(True, 0.5), nn.Dropout(0.5)).train(), torch.randn(B, T, C)

    def run(hidden=None):
        torch.manual_seed(4)
        return model[1](model[0](x, hidden))

    expected = run(HIDDEN)
    torch.manual_seed(4)
    with intervene(model, CutEdges(queries=3, keys=[1, 2])):
        found = model(x)
    torch.testing.assert_close(found, expected, rtol=0, atol=EQUAL)
    changed = (found - run()).abs().amax((0, 2)) > EQUAL
    assert changed.nonzero().flatten().tolist() == [3]


@pytest.mark.parametrize("change", [CutEdges(queries=3, keys=[1, 2]), Temperature(t=2.0)], ids=["CutEdges", "Temperature"])
def test_weights_that_a_layer_drops_itself_stay_with_a_warning(change):
    model, x = Attention(False, 0.5).train(), torch.randn(B, T, C)
    torch.manual_seed(4)
    with pytest.warns(UserWarning, match="was not applied: .*were dropped after its softmax"), intervene(model, change):
        found = model(x)
    torch.manual_seed(4)
    assert torch.equal(found, model(x))


def test_a_head_whose_weights_a_layer_drops_itself_is_knocked_out():
    model, x = Attention(False, 0.5).train(), torch.randn(B, T, C)
    torch.manual_seed(4)
    with intervene(model, KnockOut(head=1)):
        found = model(x)
    torch.manual_seed(4)
    with torch.no_grad():
        model.out.weight[:, D : 2 * D] = 0
    torch.testing.assert_close(found, model(x), rtol=0, atol=EQUAL)
