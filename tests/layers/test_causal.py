import pytest
import torch
import torch.nn.functional as F

import lectures_classes
from regard import CausalAttention, ConfigError, ShapeError
from regard.layers.causal import mask_before_softmax, renormalize_after_softmax

B, T, D_IN, D_OUT, CONTEXT = 2, 5, 7, 11, 13


def layer(dropout=0.0, **options):
    torch.manual_seed(0)
    return CausalAttention(D_IN, D_OUT, CONTEXT, dropout, **options)


def test_both_recipes_of_the_mask_give_the_same_gradients():
    scores = torch.randn(T, T, dtype=torch.float64, requires_grad=True)
    seed = torch.randn(T, T, dtype=torch.float64)
    grads = [torch.autograd.grad(f(scores), scores, seed)[0] for f in (mask_before_softmax, renormalize_after_softmax)]
    torch.testing.assert_close(*grads)


def test_the_recipes_are_the_weights_of_the_layer():
    steps = layer().double().steps(torch.randn(B, T, D_IN, dtype=torch.float64))
    torch.testing.assert_close(mask_before_softmax(steps.scaled), steps.weights)


def test_causal_context_ignores_the_future():
    x = torch.randn(B, T, D_IN)
    changed = x.clone()
    changed[:, 3:] += 1
    found, other = layer()(x), layer()(changed)
    torch.testing.assert_close(found[:, :3], other[:, :3], rtol=0, atol=0)
    assert (found[:, 3:] != other[:, 3:]).any(-1).all()


@pytest.mark.parametrize("bias", [True, False])
def test_the_lectures_state_dict_loads_its_mask_ignored_and_gives_its_context(bias):
    theirs = lectures_classes.CausalAttention(D_IN, D_OUT, CONTEXT, 0.0, bias)
    assert "mask" in theirs.state_dict()
    ours = layer(qkv_bias=bias)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    x = torch.randn(B, T, D_IN, dtype=torch.float64)
    torch.testing.assert_close(ours.double()(x), theirs.double()(x))
    assert "mask" not in ours.state_dict()


def test_dropout_is_of_the_weights_in_training_and_absent_in_evaluation():
    x = torch.randn(B, T, D_IN, dtype=torch.float64)
    ours = layer(dropout=0.5).double()
    torch.manual_seed(4)
    found = ours(x)
    torch.manual_seed(4)
    steps = ours.steps(x)
    torch.testing.assert_close(found, steps.context)
    torch.manual_seed(4)
    expected = F.dropout(steps.weights.unsqueeze(1), 0.5).squeeze(1)
    assert torch.equal(steps.dropped, expected)
    ours.eval()
    assert torch.equal(ours.steps(x).dropped, ours.steps(x).weights)
    torch.testing.assert_close(ours(x), layer().double()(x))


def test_a_sequence_longer_than_the_context_is_refused_and_one_as_long_is_not():
    assert layer()(torch.zeros(CONTEXT, D_IN)).shape == (CONTEXT, D_OUT)
    with pytest.raises(ShapeError, match="x has 14 tokens, but the layer's context_length is 13"):
        layer()(torch.zeros(CONTEXT + 1, D_IN))


@pytest.mark.parametrize("dropout", [1.0, -0.1])
def test_dropout_is_a_probability_below_one(dropout):
    with pytest.raises(ConfigError, match="below 1"):
        layer(dropout)
