"""Running sums of weights times values, over the sums of the weights, are attention with one row of scores."""

import pytest
import torch
from torch import Tensor, nn

import regard
from observe.recording_checks import assert_equal, record_and_compare
from regard.observe.interception.handwritten.recurrences import loop_check
from regard.observe.interception.handwritten.recurrences.loop_check import run_recurrence

pytestmark = pytest.mark.usefixtures("in_float64")
B, T, H, D = 2, 7, 3, 5
C = H * D


def divide(k: Tensor, v: Tensor) -> Tensor:
    """AFT-Simple without the gate of its queries. https://arxiv.org/abs/2105.14103"""
    e = k.exp()
    return (e * v).cumsum(1) / e.cumsum(1)


def divide_shifted(k: Tensor, v: Tensor) -> Tensor:
    e = (k - k.amax(1, keepdim=True)).exp()
    return torch.cumsum(e * v, dim=1) / (torch.cumsum(e, dim=1) + 1e-3)


def multiply_by_reciprocal(k: Tensor, v: Tensor) -> Tensor:
    e = k.exp()
    return (e * v).cumsum(dim=1) * e.cumsum(dim=1).clamp(min=1e-9).reciprocal()


def multiply_by_quotient(k: Tensor, v: Tensor) -> Tensor:
    e = k.exp()
    return (e * v).cumsum(1) * (1 / (e.cumsum(1) + 1e-3))


def divide_heads(k: Tensor, v: Tensor) -> Tensor:
    """Aaren: learned queries make one score of each head and token. https://arxiv.org/abs/2405.13956"""
    e = (k.unflatten(-1, (H, D)) * torch.linspace(-1, 1, D)).sum(-1).exp()
    return ((e.unsqueeze(-1) * v.unflatten(-1, (H, D))).cumsum(1) / e.cumsum(1)[..., None]).flatten(2)


def divide_tokens_first(k: Tensor, v: Tensor) -> Tensor:
    e = k[..., :1].transpose(0, 1).exp()
    return ((e * v.transpose(0, 1)).cumsum(0) / e.cumsum(0)).transpose(0, 1)


def divide_freed(k: Tensor, v: Tensor) -> Tensor:
    return (k.exp() * (2 * v)).cumsum(1) / k.exp().cumsum(1)


FORMS = {
    divide: (lambda k: k.exp(), 0),
    divide_shifted: (lambda k: (k - k.amax(1, keepdim=True)).exp(), 1e-3),
    multiply_by_reciprocal: (lambda k: k.exp(), 0),
    multiply_by_quotient: (lambda k: k.exp(), 1e-3),
    divide_heads: (lambda k: (k.unflatten(-1, (H, D)) * torch.linspace(-1, 1, D)).sum(-1).exp(), 0),
    divide_tokens_first: (lambda k: k[..., :1].exp(), 0),
    divide_freed: (lambda k: k.exp(), 0),
}


class Averaged(nn.Module):
    """A layer that averages its values so far with weights of its keys."""

    def __init__(self, form) -> None:
        super().__init__()
        self.project, self.form = nn.Linear(C, 2 * C), form

    def forward(self, x: Tensor) -> Tensor:
        k, v = self.project(x).chunk(2, -1)
        self.k, self.v, self.y = k.detach(), v.detach(), self.form(k, v)
        return self.y


@pytest.mark.parametrize("has_gradients", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_running_means_have_the_softmax_of_one_row_of_scores(form, has_gradients):
    weigh, added = FORMS[form]
    layer, x = Averaged(form), torch.randn(B, T, C)
    with torch.set_grad_enabled(has_gradients):
        recording, _ = record_and_compare(nn.Sequential(layer), lambda m: m(x), keep="values")
    (call,) = recording.calls
    with torch.no_grad():
        w = weigh(layer.k).movedim(1, -1)  # (b, heads, t)
        expected = (w.unsqueeze(2) / (w.cumsum(-1) + added).unsqueeze(3)).tril()
        assert_equal(call.map.dense(), expected)
        heads = w.shape[1]
        v = layer.v.unflatten(-1, (heads, C // heads)).transpose(1, 2) * (2 if form is divide_freed else 1)
        assert_equal(recording.values(0, kind="implicit"), v)
        assert_equal(call.map.dense() @ v, layer.y.unflatten(-1, (heads, C // heads)).transpose(1, 2))


def test_every_layer_of_running_means_is_recorded_in_float32_too():
    model = nn.Sequential(*(Averaged(divide) for _ in range(3))).float()
    recording, _ = record_and_compare(model, lambda m: m(torch.randn(B, T, C, dtype=torch.float32)))
    assert [call.name for call in recording.calls] == ["0", "1", "2"]


def test_means_that_queries_multiply_are_recorded_once():
    class Gated(Averaged):
        def forward(self, x: Tensor) -> Tensor:
            k, v = self.project(x).chunk(2, -1)
            return torch.sigmoid(nn.functional.linear(x, self.project.weight[:C])) * divide(k, v)

    recording, _ = record_and_compare(Gated(divide), lambda m: m(torch.randn(B, T, C)))
    assert len(recording.calls) == 1


OTHERS = {
    "other weights": lambda k, v: v.cumsum(1) / k.cumsum(1),
    "weights plus a number": lambda k, v: (k * v).cumsum(1) / (k + 1).cumsum(1),
    "product": lambda k, v: (k * v).cumsum(1) * k.cumsum(1),
    "product with the negative": lambda k, v: (k * v).cumsum(1) * -k.cumsum(1),
    "product with a difference": lambda k, v: (k * v).cumsum(1) * (-k.cumsum(1) + 1),
    "product with a bound": lambda k, v: (k * v).cumsum(1) * (-k.cumsum(1)).clamp(max=-1),
}


@pytest.mark.parametrize("form", OTHERS)
def test_products_and_quotients_of_other_sums_are_no_means(form):
    recording, _ = record_and_compare(Averaged(OTHERS[form]), lambda m: m(torch.randn(B, T, C)))
    assert not recording.calls


def test_sums_of_all_that_was_written_are_compared_at_once_as_token_by_token(monkeypatch):
    parts = {name: torch.randn(B, T, 1) for name in ("q", "k")} | {name: torch.randn(B, T) for name in ("key_scale", "skip")}
    given = {**parts, "decay": torch.zeros(B, T, 1)}, torch.randn(B, T, D), None, False
    found = run_recurrence(*given)
    monkeypatch.setattr(loop_check, "sums_all", lambda *_: False)
    for one, other in zip(found, run_recurrence(*given), strict=True):
        assert_equal(one, other)


def test_means_that_an_intervention_should_change_stay_with_a_warning():
    model, x = nn.Sequential(Averaged(divide)), torch.randn(B, T, C)
    plain = model(x)
    change = regard.KnockOut(layer=0, kind="implicit")
    with torch.no_grad(), pytest.warns(UserWarning, match="was not applied"), regard.intervene(model, change):
        assert torch.equal(model(x), plain)
