"""attends: torch's own product, and inside record a call with the weights that a model's code names."""

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import regard

pytestmark = pytest.mark.usefixtures("in_float64")
T, WIDTH = 7, 6
CAUSAL = torch.ones(T, T).tril().bool()


class Layer(nn.Module):
    """Attention of `heads` heads, folded into the batch or not, whose weights a function makes of the scores."""

    def __init__(self, weigh, heads: int = 1, folds: bool = False) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.weigh, self.heads, self.folds = weigh, heads, folds

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one.unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in self.project(x).chunk(3, -1))
        q, k, v = (one.flatten(0, 1) for one in (q, k, v)) if self.folds else (q, k, v)
        self.weights = self.weigh(q @ k.mT)
        y = regard.attends(self.weights, v, heads=self.heads if self.folds else None)
        y = y.unflatten(0, (-1, self.heads)) if self.folds else y
        return x + y.transpose(1, 2).flatten(2)


def weigh_by_softmax(scores: Tensor) -> Tensor:
    return scores.masked_fill(~CAUSAL, -torch.inf).softmax(-1)


def weigh_by_relu(scores: Tensor) -> Tensor:
    return scores.masked_fill(~CAUSAL, 0).relu()


WEIGHTS = {"self": weigh_by_softmax, "implicit": weigh_by_relu}


def build_model(kind: str, heads: int = 3, folds: bool = False) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(Layer(WEIGHTS[kind], heads, folds) for _ in range(2)))


def draw_tokens() -> Tensor:
    return torch.randn(2, T, WIDTH, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(
    "shapes", [((5, 7), (7, 3)), ((2, 5, 7), (2, 7, 3)), ((2, 3, 5, 7), (2, 3, 7, 3)), ((3, 5, 7), (7, 2))]
)
def test_it_is_the_product_of_torch_to_the_bit_with_its_gradients(shapes):
    weights, values = (torch.randn(shape, requires_grad=True) for shape in shapes)
    ours, theirs = regard.attends(weights, values), weights @ values
    assert torch.equal(ours, theirs)
    for one, other in zip(*(torch.autograd.grad(y.square().sum(), (weights, values)) for y in (ours, theirs)), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("folds", [False, True])
@pytest.mark.parametrize("kind", WEIGHTS)
def test_a_recording_has_one_call_for_each_with_exactly_these_weights(kind, folds):
    model, x = build_model(kind, folds=folds), draw_tokens()
    expected = model(x)
    with regard.record(model, keep="values") as recording:
        output = model(x)
    assert torch.equal(output, expected)
    assert [call.name for call in recording.calls] == ["0", "1"]
    assert recording.layers(kind) == ["0", "1"]
    assert not recording.missed
    for n, layer in enumerate(model):
        found = recording.map(n, kind=kind)
        assert found.shape == (2, 3, T, T)
        assert_close(found.dense(), layer.weights.detach().reshape(2, 3, T, T))
        assert found.certificate().error < 1e-14


@pytest.mark.parametrize("kind", WEIGHTS)
def test_a_cut_pair_has_no_weight_and_a_softmax_spreads_it_over_the_others(kind):
    model, x = build_model(kind), draw_tokens()
    weights = (model(x), model[0].weights)[1].detach().clone()
    cut = regard.CutEdges(layer=0, head=1, queries=5, keys=[0, 2], kind=kind)
    with regard.intervene(model, cut), regard.record(model) as recording:
        model(x)
    weights[:, 1, 5, [0, 2]] = 0
    if kind == "self":
        weights[:, 1, 5] /= weights[:, 1, 5].sum(-1, keepdim=True)
    assert_close(recording.map(0, kind=kind).dense(), weights)


@pytest.mark.parametrize("kind", WEIGHTS)
def test_a_knocked_out_head_adds_nothing(kind):
    model, x = build_model(kind)[:1], draw_tokens()
    with regard.intervene(model, regard.KnockOut(layer=0, head=1, kind=kind)):
        y = model(x) - x
    assert not y[..., 2:4].any()
    assert torch.equal(y[..., 4:], (model(x) - x)[..., 4:])


@pytest.mark.parametrize("kind", WEIGHTS)
def test_patched_weights_are_those_of_the_other_input(kind):
    model, x = build_model(kind)[:1], draw_tokens()
    with regard.record(model) as recording:
        model(x.flip(0))
    theirs = model[0].weights.detach()
    with regard.intervene(model, regard.Patch(recording=recording, layer=0, kind=kind)):
        y = model(x)
    v = model[0].project(x)[..., 2 * WIDTH :].unflatten(-1, (3, -1)).transpose(1, 2)
    assert_close(y, x + (theirs @ v).transpose(1, 2).flatten(2))


def test_a_temperature_divides_the_logarithms_of_a_softmax_and_other_weights_have_none():
    model, x = build_model("self")[:1], draw_tokens()
    with regard.intervene(model, regard.Temperature(layer=0, head=2, t=0.3)):
        changed = torch.autograd.grad(model(x).square().sum(), [*model.parameters()])
    temperatures = torch.tensor([1, 1, 0.3]).view(3, 1, 1)
    model[0].weigh = lambda scores: weigh_by_softmax(scores / temperatures)
    for one, other in zip(changed, torch.autograd.grad(model(x).square().sum(), [*model.parameters()]), strict=True):
        assert_close(one, other)
    model, change = build_model("implicit"), regard.Temperature(layer=0, t=0.3, kind="implicit")
    with pytest.warns(UserWarning, match="scores that they were made of are not known"), regard.intervene(model, change):
        model(x)


def test_steps_with_a_cache_are_one_map():
    class Cached(nn.Module):
        cache = torch.zeros(2, 0, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            self.cache = torch.cat([self.cache, x], 1)
            past, t = self.cache.shape[1] - x.shape[1], self.cache.shape[1]
            return regard.attends((x @ self.cache.mT).masked_fill(~CAUSAL[past:t, :t], -torch.inf).softmax(-1), self.cache)

    steps, whole, x = Cached(), Cached(), draw_tokens()
    with torch.no_grad(), regard.record(steps) as recording, regard.record(whole) as expected:
        whole(x)
        for part in x.split([5, 1, 1], 1):
            steps(part)
    assert_close(recording.map(0).dense(), expected.map(0).dense())


@pytest.mark.parametrize(
    ("shapes", "heads"),
    [
        (((2, 5, 7), (3, 7, 3)), None),
        (((4, 5, 7), (4, 7, 3)), 3),
        (((2, 2, 5, 7), (2, 2, 7, 3)), 2),
    ],
)
def test_shapes_that_do_not_multiply_and_heads_that_do_not_divide_are_refused_with_both(shapes, heads):
    with pytest.raises(regard.ShapeError) as refused:
        regard.attends(*map(torch.ones, shapes), heads=heads)
    assert all(str(shape) in str(refused.value) for shape in shapes)


def test_a_compiled_model_computes_the_product_in_one_graph():
    model, x = build_model("self"), draw_tokens()
    assert torch.equal(torch.compile(model, fullgraph=True, backend="eager")(x), model(x))
