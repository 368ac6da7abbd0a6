"""An examination leaves everything as it found it."""

import random
import warnings

import numpy
import pytest
import torch
from torch import nn

import regard
from examination.subjects import D_IN, Layer, hiding, later
from regard.examination.subject.restore_state import preserve_state


class Careless(Layer):
    """A layer that changes itself whenever it runs."""

    def __init__(self):
        super().__init__(hiding(later))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("gone", torch.ones(3))
        self.drop = nn.Dropout(0.5)
        self.mask = None

    def forward(self, x):
        self.count += 1
        self.mask = later(x.shape[1], x.shape[1])
        self.gone = None
        self.W_query.weight.data.add_(1e-3)
        warnings.warn("careless", UserWarning, stacklevel=1)
        torch.rand(1), random.random(), numpy.random.rand()  # noqa: NPY002
        return super().forward(x)


class Remembers(Layer):
    """A layer that writes to whatever it holds."""

    def __init__(self):
        super().__init__(hiding(later))
        self.said, self.table, self.plain = [1], {"a": [2]}, torch.zeros(3)
        self.register_buffer("small", torch.ones(3, 3).to(torch.float8_e4m3fn))
        self.register_buffer("sparse", torch.eye(3).to_sparse())
        self.register_buffer("last", torch.zeros(()))

    def forward(self, x):
        self.said.append(3), self.table["a"].append(4), self.plain.add_(1), self.last.add_(1)
        self.small.copy_(torch.zeros(3, 3))
        self.sparse.mul_(2)
        self.register_buffer("late", torch.zeros(()))
        torch.use_deterministic_algorithms(True)
        return super().forward(x)


def states():
    return torch.get_rng_state().tolist(), random.getstate(), str(numpy.random.get_state())  # noqa: NPY002


@pytest.mark.slow
def test_a_module_that_changes_itself_is_as_it_was():
    layer = Careless().train()
    layer.drop.eval()
    layer.W_key.weight.requires_grad_(False)
    layer.W_query.weight.grad = grad = torch.ones_like(layer.W_query.weight)
    before = {name: x.clone() for name, x in layer.state_dict().items()}
    held = {name: id(x) for name, x in layer.named_parameters()}
    regard.examine(layer)
    assert layer.training
    assert not layer.drop.training
    assert layer.mask is None
    assert not layer.W_key.weight.requires_grad
    assert layer.W_query.weight.grad is grad
    assert (grad == 1).all()
    assert layer.W_value.weight.grad is None
    assert {name: id(x) for name, x in layer.named_parameters()} == held
    assert layer.state_dict().keys() == before.keys()
    assert all(torch.equal(x, before[name]) for name, x in layer.state_dict().items())


@pytest.mark.slow
def test_no_generator_has_moved_and_no_warning_is_given():
    layer = Careless()
    torch.manual_seed(3)
    before = states()
    regard.examine(layer)
    assert states() == before


def test_what_was_changed_is_put_back_where_the_subject_raises():
    layer = Careless()

    def run():
        with preserve_state(layer):
            layer(torch.zeros(2, 3, D_IN))
            layer(torch.zeros(2, 3, D_IN + 1))

    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        run()
    assert layer.count == 0
    assert layer.training


def test_lists_and_tensors_of_every_layout_are_put_back():
    layer = Remembers()
    report = regard.examine(layer)
    assert report, str(report)
    assert (layer.said, layer.table) == ([1], {"a": [2]})
    assert (layer.plain == 0).all()
    assert (layer.small.float() == 1).all()
    assert torch.equal(layer.sparse.to_dense(), torch.eye(3))
    assert layer.last == 0
    assert "late" not in layer._buffers
    assert not torch.are_deterministic_algorithms_enabled()


def make_layer_on_meta():
    with torch.device("meta"):
        return Layer(hiding(later))


class Traced(torch.nn.Module):
    def forward(self, x):
        return x.cumsum(1)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: torch.jit.script(Traced()), "the module that it was made of"),
        (lambda: torch.jit.trace(Traced(), torch.ones(2, 6, D_IN)), "the module that it was made of"),
        (lambda: nn.Sequential(nn.LazyLinear(3)), "Call it once"),
        (make_layer_on_meta, "Load them"),
    ],
)
def test_what_cannot_be_put_back_is_refused(make, says):
    with pytest.raises(regard.ConfigError, match=says):
        regard.examine(make())
