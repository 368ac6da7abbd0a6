"""Changes of attention whose queries pick keys are those of the layer with these keys left out of what was picked."""

import pytest
import torch
from torch import Tensor, nn

from regard import ConfigError, CutEdges, KnockOut, Patch, Temperature, intervene, record

B, H, T, D, PICKED = 2, 3, 9, 4, 4
C = H * D
pytestmark = pytest.mark.usefixtures("float64")


@pytest.fixture
def float64():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


class TopK(nn.Module):
    """Each query attends to the keys with the largest scores, whose values are gathered."""

    def __init__(self, bounded: bool = False) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.project, self.out, self.bounded = nn.Linear(C, 3 * C), nn.Linear(C, C), bounded

    def forward(self, x: Tensor, hidden: Tensor | None = None, t: float = 1.0, off: int | None = None) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
        found, where = (q @ k.mT / D**0.5).topk(PICKED)
        if self.bounded:
            found = found - torch.cos(found)
        if hidden is not None:
            found = found.masked_fill(hidden.gather(1, where.flatten(0, 2)).view(found.shape), -torch.inf)
        weights = (found / t).softmax(-1).nan_to_num(0)
        values = v.unsqueeze(2).expand(-1, -1, T, -1, -1).gather(3, where.unsqueeze(-1).expand(-1, -1, -1, -1, D))
        context = (weights.unsqueeze(-1) * values).sum(-2)
        if off is not None:
            context = torch.cat([context[:, :off], context[:, off : off + 1] * 0, context[:, off + 1 :]], 1)
        return self.out(context.transpose(1, 2).flatten(2))


def hide(queries: list[int], keys: list[int]) -> Tensor:
    hidden = torch.zeros(T, T, dtype=torch.bool)
    hidden[torch.tensor(queries).unsqueeze(-1), keys] = True
    return hidden.expand(B * H, T, T).reshape(B * H * T, T)


def check(model: nn.Module, x: Tensor, found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    inputs, outward = [x, *model.parameters()], torch.randn_like(found)
    ours, theirs = (torch.autograd.grad(y, inputs, outward) for y in (found, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("bounded", [False, True])
def test_cut_keys_are_left_out_of_what_was_picked_with_gradients(bounded):
    model, x = TopK(bounded), torch.randn(B, T, C, requires_grad=True)
    with intervene(model, CutEdges(queries=[3, 4, 8], keys=[1, 2, 5])):
        found = model(x)
    check(model, x, found, model(x, hide([3, 4, 8], [1, 2, 5])))
    assert not torch.allclose(found, model(x))


@pytest.mark.parametrize("bounded", [False, True])
def test_a_head_that_picks_keys_is_knocked_out(bounded):
    model, x = TopK(bounded), torch.randn(B, T, C, requires_grad=True)
    with intervene(model, KnockOut(layer=0, head=1)):
        found = model(x)
    check(model, x, found, model(x, off=1))


def test_a_temperature_divides_the_scores_of_picked_keys():
    model, x = TopK(), torch.randn(B, T, C, requires_grad=True)
    with intervene(model, Temperature(t=1.7)):
        found = model(x)
    check(model, x, found, model(x, t=1.7))


def test_weights_of_other_picked_keys_are_patched():
    model, x, other = TopK(), torch.randn(B, T, C, requires_grad=True), torch.randn(B, T, C)
    with record(model) as source:
        model(other)
    with record(model, keep="values") as recording, intervene(model, Patch(recording=source)):
        found = model(x)
    values = model.project(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)[2]
    expected = model.out((source.map(0).dense() @ values).transpose(1, 2).flatten(2))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert recording.map(0).shape == source.map(0).shape


def test_weights_on_keys_that_no_query_picked_are_not_patched():
    model, x, other = TopK(), torch.randn(B, T, C), torch.randn(B, T, C)
    model.project.weight.data[: 2 * C] *= 9  # all queries pick the same few keys
    model.project.bias.data[: 2 * C] *= 99
    with record(model) as source:
        model(other)
    told = pytest.raises(ConfigError, match="whose values it did not gather")
    with told, intervene(model, Patch(recording=source)):
        model(x)
