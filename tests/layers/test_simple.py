import pytest
import torch

from oracle import attention as oracle
from regard import ShapeError, SimpleSelfAttention

B, T, D = 2, 5, 7


def test_the_context_is_softmax_of_x_x_transposed_times_x():
    x = torch.randn(B, T, D, dtype=torch.float64)
    four = x.unsqueeze(1).numpy()
    weights, context = oracle(four, four, four, scale=1.0)
    layer = SimpleSelfAttention()
    torch.testing.assert_close(layer(x), torch.tensor(context[:, 0]))
    torch.testing.assert_close(layer.steps(x).weights, torch.tensor(weights[:, 0]))


def test_steps_and_forward_agree_with_and_without_a_batch():
    x = torch.randn(B, T, D, dtype=torch.float64)
    layer = SimpleSelfAttention()
    torch.testing.assert_close(layer.steps(x).context, layer(x))
    torch.testing.assert_close(layer(x[0]), layer(x)[0])
    assert layer.steps(x[0]).weights.shape == (T, T)
    assert layer.steps(x).weights.shape == (B, T, T)


@pytest.mark.parametrize("shape", [(D,), (1, B, T, D)])
def test_other_ranks_are_refused(shape):
    with pytest.raises(ShapeError, match=r"x must be \(t, d_in\) or \(b, t, d_in\)"):
        SimpleSelfAttention()(torch.zeros(shape))
