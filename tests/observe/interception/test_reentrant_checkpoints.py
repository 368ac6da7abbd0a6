"""Attribution and maps with a graph, of models whose layers run in activation checkpoints of both kinds."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import regard
from observe.families import FAMILIES

EQUAL = 1e-10  # float64
NAMES = ("gpt2", "llama", "bert", "t5", "bart")


def build(name, reentrant, implementation):
    """A model in training, without dropout, with or without checkpoints; and its input."""
    family = next(family for family in FAMILIES if family.name == name)
    model = family.build(torch.float64, attn_implementation=implementation)
    if reentrant is not None:
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
    for module in model.train().modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for dropout in ("dropout", "attention_dropout", "activation_dropout", "layerdrop"):
            if isinstance(getattr(module, dropout, None), float):
                setattr(module, dropout, 0.0)
    return model, family.feed(model, "none")


def attribute(name, reentrant, implementation="sdpa"):
    """The pull of every layer on a number, and the gradients of a loss on the first map, with the recording left open."""
    model, given = build(name, reentrant, implementation)
    with regard.record(model, keep="values") as recording:
        hidden = model(**given).last_hidden_state
        number = hidden[:, -1].square().sum()
        attribution = recording.attribute(number)
        assert all(parameter.grad is None for parameter in model.parameters())
        recording.map(-1, grad=True).dense().square().sum().backward()
    assert len(recording.runs) == 1
    pulls = [attribution.map(layer).dense() for layer in range(len(recording.layers()))]
    return pulls, [parameter.grad for parameter in model.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore:`use_cache=True` is incompatible")
def test_checkpoints_change_neither_pull_nor_gradients(name, reentrant, implementation):
    (pulls, gradients), (expected, theirs) = attribute(name, reentrant, implementation), attribute(name, None, implementation)
    assert expected
    for one, other in zip(pulls, expected, strict=True):
        assert other.any()
        assert float((one - other).abs().max()) < EQUAL * float(other.abs().max())
    size = max(float(one.abs().max()) for one in theirs if one is not None)  # that of a bias of keys is 0 but for rounding
    for one, other in zip(gradients, theirs, strict=True):
        assert (one is None) == (other is None)
        assert one is None or float((one - other).abs().max()) < EQUAL * size


class Checkpointed(torch.nn.Module):
    """A layer in a reentrant checkpoint that does not know of transformers."""

    def __init__(self):
        super().__init__()
        self.layer = regard.MultiHeadAttention(8, 8, 12, 0.0, 2)
        self.ran = 0

    def run(self, x):
        self.ran += 1
        return self.layer(x)

    def forward(self, x):
        return checkpoint(self.run, x, use_reentrant=True)


def test_a_checkpoint_is_replaced_only_while_values_are_kept():
    model, x = Checkpointed(), torch.randn(2, 5, 8, requires_grad=True)
    plain = model(x)
    with regard.record(model) as recording:
        assert type(model(x).grad_fn) is type(plain.grad_fn)
    assert recording.calls[0].stored.graph is None
    with regard.record(model, keep="values") as kept:
        inside = model(x)
    assert type(inside.grad_fn) is not type(plain.grad_fn)
    assert torch.equal(inside, plain)
    assert kept.attribute(inside.sum()).map(0).certificate().error < 1e-4
    assert type(model(x).grad_fn) is type(plain.grad_fn)
    (gradient,) = torch.autograd.grad(inside.square().sum(), x)
    plain.square().sum().backward()
    assert torch.equal(gradient, x.grad)
    with pytest.warns(UserWarning, match="None of the inputs"), regard.record(model, keep="values") as frozen:
        model(x.detach())  # a reentrant checkpoint gives no gradient without an input that has one
    assert frozen.calls[0].stored.graph is None
