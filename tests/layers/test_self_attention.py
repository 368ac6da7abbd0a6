import pytest
import torch

import lectures_classes
from regard import BareSelfAttention, ConfigError, SelfAttention, ShapeError

B, T, D_IN, D_OUT = 2, 5, 7, 11


def test_bare_weights_are_drawn_as_the_lectures_draw_them():
    torch.manual_seed(123)
    bare = BareSelfAttention(D_IN, D_OUT)
    torch.manual_seed(123)
    theirs = lectures_classes.SelfAttentionV1(D_IN, D_OUT)
    for name, weight in theirs.state_dict().items():
        assert torch.equal(bare.state_dict()[name], weight)


def test_weights_of_the_lectures_class_load_and_give_its_context():
    theirs = lectures_classes.SelfAttentionV1(D_IN, D_OUT)
    bare = BareSelfAttention(D_IN, D_OUT)
    bare.load_state_dict(theirs.state_dict())
    x = torch.randn(T, D_IN, dtype=torch.float64)
    torch.testing.assert_close(bare.double()(x), theirs.double()(x))


@pytest.mark.parametrize("bias", [True, False])
def test_linear_attention_projects_scores_weighs_and_mixes(bias):
    layer = SelfAttention(D_IN, D_OUT, qkv_bias=bias).double()
    x = torch.randn(B, T, D_IN, dtype=torch.float64)
    q, k, v = layer.W_query(x), layer.W_key(x), layer.W_value(x)
    torch.testing.assert_close(layer(x), (q @ k.mT / D_OUT**0.5).softmax(-1) @ v)
    assert (layer.W_query.bias is not None) == bias


def test_bare_to_linear_and_back_is_the_same_function_with_the_same_gradients():
    bare = BareSelfAttention(D_IN, D_OUT).double()
    linear = bare.to_linear()
    x = torch.randn(B, T, D_IN, dtype=torch.float64)
    seed = torch.randn(B, T, D_OUT, dtype=torch.float64)
    torch.testing.assert_close(linear(x), bare(x))
    (linear(x) * seed).sum().backward()
    (bare(x) * seed).sum().backward()
    for name in ("W_query", "W_key", "W_value"):
        torch.testing.assert_close(getattr(linear, name).weight.grad.T, getattr(bare, name).grad)
        assert torch.equal(getattr(linear.to_bare(), name), getattr(bare, name))


@pytest.mark.parametrize("make", [BareSelfAttention, SelfAttention])
def test_steps_have_the_rank_of_x_and_end_in_forward_s_context(make):
    layer = make(D_IN, D_OUT).double()
    x = torch.randn(B, T, D_IN, dtype=torch.float64)
    steps = layer.steps(x)
    assert steps.scores.shape == (B, T, T)
    torch.testing.assert_close(steps.context, layer(x))
    assert layer.steps(x[0]).scores.shape == (T, T)
    torch.testing.assert_close(layer(x[0]), layer(x)[0])


@pytest.mark.parametrize("make", [BareSelfAttention, SelfAttention])
def test_a_wrong_width_names_both(make):
    with pytest.raises(ShapeError, match=r"= \(2, 5, 8\): its d_in is 8, but the layer's is 7"):
        make(D_IN, D_OUT)(torch.zeros(B, T, 8))
    with pytest.raises(ConfigError, match="d_out must be a whole number of at least 1, got 0"):
        make(D_IN, 0)
