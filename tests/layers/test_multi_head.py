import pytest
import torch

import lectures_classes
import oracle
from regard import ConfigError, MultiHeadAttention, ShapeError, StackedHeads

B, T, D_IN, D_HEAD, H, CONTEXT = 2, 5, 7, 11, 3, 13
D_OUT = D_HEAD * H
BIAS = pytest.mark.parametrize("bias", [True, False])


def make_stacked_heads(bias=False, dropout=0.0):
    torch.manual_seed(0)
    return StackedHeads(D_IN, D_HEAD, CONTEXT, dropout, H, bias).double()


def split(bias=False, dropout=0.0):
    torch.manual_seed(1)
    return MultiHeadAttention(D_IN, D_OUT, CONTEXT, dropout, H, bias).double()


def x(seed=2):
    torch.manual_seed(seed)
    return torch.randn(B, T, D_IN, dtype=torch.float64)


def test_each_split_head_is_attention_on_its_own_columns():
    layer = split(bias=True)
    q, k, v = (
        W(x()).detach().numpy().reshape(B, T, H, D_HEAD).swapaxes(1, 2) for W in (layer.W_query, layer.W_key, layer.W_value)
    )
    weights, context = oracle.attention(q, k, v, lambda b, h, i, j: j <= i)
    torch.testing.assert_close(layer.steps(x()).weights, torch.tensor(weights))
    joined = torch.tensor(context.swapaxes(1, 2).reshape(B, T, D_OUT))
    torch.testing.assert_close(layer(x()), layer.out_proj(joined))


@BIAS
def test_stacked_to_split_is_the_same_function(bias):
    whole = MultiHeadAttention.from_stacked(make_stacked_heads(bias))
    torch.testing.assert_close(whole(x()), make_stacked_heads(bias)(x()))
    assert torch.equal(whole.out_proj.weight, torch.eye(D_OUT, dtype=torch.float64))
    torch.testing.assert_close(whole.steps(x()).weights, make_stacked_heads(bias).steps(x()).weights)


@BIAS
def test_split_to_stacked_is_the_same_function(bias):
    both = split(bias).to_stacked()
    assert isinstance(both[0], StackedHeads)
    torch.testing.assert_close(both(x()), split(bias)(x()))
    torch.testing.assert_close(both[0].steps(x()).weights, split(bias).steps(x()).weights)


@BIAS
def test_stacked_and_split_have_the_same_gradients(bias):
    heads, seed = make_stacked_heads(bias), torch.randn(B, T, D_OUT, dtype=torch.float64)
    whole = MultiHeadAttention.from_stacked(heads)
    inputs = [x().requires_grad_() for _ in range(2)]
    (heads(inputs[0]) * seed).sum().backward()
    (whole(inputs[1]) * seed).sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
    for name in ("W_query", "W_key", "W_value"):
        for part in ("weight", "bias") if bias else ("weight",):
            parts = torch.cat([getattr(getattr(head, name), part).grad for head in heads])
            torch.testing.assert_close(getattr(getattr(whole, name), part).grad, parts)


def test_conversion_draws_nothing_and_keeps_mode_dtype_and_dropout():
    heads = make_stacked_heads(dropout=0.25).eval()
    state = torch.get_rng_state()
    whole = MultiHeadAttention.from_stacked(heads)
    back = whole.to_stacked()
    assert torch.equal(torch.get_rng_state(), state)
    assert not whole.training
    assert not back.training
    assert whole.W_query.weight.dtype == torch.float64
    assert whole.dropout.p == next(iter(back[0])).dropout.p == 0.25


@BIAS
@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (lectures_classes.MultiHeadAttentionWrapper, StackedHeads),
        (lectures_classes.MultiHeadAttention, MultiHeadAttention),
    ],
)
def test_the_lectures_state_dict_loads_its_masks_ignored_and_gives_its_output(theirs, ours, bias):
    them = theirs(D_IN, D_OUT, CONTEXT, 0.0, H, bias)
    us = ours(D_IN, D_OUT, CONTEXT, 0.0, H, bias)
    us.load_state_dict(them.state_dict(), strict=True)
    torch.testing.assert_close(us.double()(x()), them.double()(x()))


def test_seeded_weights_are_those_of_the_lectures_classes():
    for theirs, ours in (
        (lectures_classes.MultiHeadAttentionWrapper, StackedHeads),
        (lectures_classes.MultiHeadAttention, MultiHeadAttention),
    ):
        states = []
        for make in (theirs, ours):
            torch.manual_seed(123)
            states.append(make(D_IN, D_OUT, CONTEXT, 0.0, H).state_dict())
        for name, weight in states[1].items():
            assert torch.equal(states[0][name], weight)


@pytest.mark.parametrize("make", [make_stacked_heads, split])
def test_steps_are_those_of_every_head_before_they_are_joined(make):
    steps = make().steps(x())
    assert steps.weights.shape == (B, H, T, T)
    assert steps.context.shape == (B, H, T, D_HEAD)
    alone = make().steps(x()[0])
    assert alone.weights.shape == (H, T, T)
    torch.testing.assert_close(alone.weights, steps.weights[0])
    torch.testing.assert_close(make()(x()[0]), make()(x())[0])


def test_dropout_is_zero_outside_training_and_in_forward_what_it_is_in_steps():
    layer = split(dropout=0.5)
    torch.manual_seed(3)
    found = layer(x())
    torch.manual_seed(3)
    dropped = layer.steps(x()).context.transpose(1, 2).flatten(-2)
    torch.testing.assert_close(found, layer.out_proj(dropped))
    torch.testing.assert_close(layer.eval()(x()), split()(x()))


def test_a_padded_or_longer_sequence_changes_nothing_before_it():
    layer = split()
    torch.testing.assert_close(layer(x())[:, :3], layer(x()[:, :3]))


def test_a_width_that_the_heads_cannot_share_names_one_that_works():
    with pytest.raises(ConfigError, match=r"d_out=100, num_heads=12. Nearest valid width: 96"):
        MultiHeadAttention(D_IN, 100, CONTEXT, 0.0, 12)
    with pytest.raises(ConfigError, match="num_heads must be a whole number"):
        StackedHeads(D_IN, D_OUT, CONTEXT, 0.0, 0)


@pytest.mark.parametrize("make", [make_stacked_heads, split])
def test_too_many_tokens_and_wrong_widths_are_refused(make):
    with pytest.raises(ShapeError, match="14 tokens, but the layer's context_length is 13"):
        make()(torch.zeros(B, CONTEXT + 1, D_IN, dtype=torch.float64))
    with pytest.raises(ShapeError, match="its d_in is 8"):
        make().steps(torch.zeros(B, T, 8, dtype=torch.float64))
