import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from bounds import EXPONENTIAL, SMALLEST, assert_within, gamma, unit_roundoff
from regard.layers.gelu import gelu_tanh
from run_limits import limit_examples
from skips import NEEDS_LOOPS

pytestmark = NEEDS_LOOPS


def exact_gelu(x):
    """GELU by the tanh, as x sigmoid(z): torch's 1 + tanh has no digit left far below 0, in float64 neither."""
    found = x * (2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)).sigmoid()
    torch.testing.assert_close(found, F.gelu(x, approximate="tanh"), rtol=0, atol=1e-10)
    return found


def gelu_bounds(x):
    """Of x s with s = sigmoid(z), z = 2 √(2/π) (x + 0.044715 x³), computed in float32, and of its derivative.

    z is off by γ(6) |z|, a number of 6 operations; exp(-|z|) by as much of itself and by its own operations, and s by
    (1 - s) of that where z is positive, by all of it where z is negative. The derivative is s + x s (1 - s) dz/dx.
    """
    x = x.detach().double()
    factor = 2 * math.sqrt(2 / math.pi)
    z, slope = factor * (x + 0.044715 * x**3), factor * (1 + 3 * 0.044715 * x**2)
    s, inner = z.sigmoid(), gamma(torch.float32, 6) * z.abs()
    share = s * (gamma(torch.float32, EXPONENTIAL + 4) + (1 - s) * inner) + SMALLEST
    bend = x.abs() * slope * (s * (1 - s) * (gamma(torch.float32, 2 * EXPONENTIAL + 12) + inner) + SMALLEST)
    return 2 * x.abs() * share, 2 * (share + bend)


@settings(max_examples=limit_examples(20), deadline=None)
@given(st.integers(1, 40), st.floats(0.1, 40))
def test_gelu_and_its_gradient_are_those_of_float64(runs, size):
    torch.manual_seed(runs)
    x = (torch.randn(runs * 2**11 + 2**16 + 3) * size).requires_grad_()
    seed = torch.randn_like(x)
    found = gelu_tanh(x)
    wide = x.detach().double().requires_grad_()
    expected = exact_gelu(wide)
    slope, (grad,) = torch.autograd.grad(expected, wide, seed.double())[0], torch.autograd.grad(found, x, seed)
    most, steepest = gelu_bounds(x)
    assert_within(found, expected, most)
    assert_within(grad, slope, seed.double().abs() * steepest)


@pytest.mark.slow
@pytest.mark.emulated
def test_of_bfloat16_gelu_is_that_of_float32_rounded_once():
    torch.manual_seed(1)
    x = (torch.randn(313, 401) * 3).bfloat16()
    expected, (rounding, _) = exact_gelu(x.double()), gelu_bounds(x)
    found = gelu_tanh(x)
    assert found.dtype == torch.bfloat16
    assert_within(found, expected, rounding + unit_roundoff(torch.bfloat16) * (expected.abs() + rounding))


def test_what_the_loops_do_not_know_goes_through_torch():
    x = torch.randn(313, 401, dtype=torch.float64, requires_grad=True)
    assert torch.equal(gelu_tanh(x), F.gelu(x, approximate="tanh"))
    assert torch.autograd.gradcheck(gelu_tanh, x[:3, :4].detach().requires_grad_())
    assert torch.equal(torch.func.vmap(gelu_tanh)(x.float()), F.gelu(x.float(), approximate="tanh"))


def test_derivatives_of_the_gradient_and_along_a_direction_are_torchs():
    x = torch.randn(2**16).requires_grad_()
    for gelu in (gelu_tanh, lambda x: F.gelu(x, approximate="tanh")):
        (slope,) = torch.autograd.grad((gelu(x) + x**3).sum(), x, create_graph=True)
        (bend,) = torch.autograd.grad(slope.sum(), x)
        with torch.autograd.forward_ad.dual_level():
            along = torch.autograd.forward_ad.unpack_dual(
                gelu(torch.autograd.forward_ad.make_dual(x.detach(), torch.ones_like(x)))
            )
        if gelu is gelu_tanh:
            found = bend, along.tangent
    assert torch.allclose(found[0], bend, rtol=0, atol=1e-4)
    assert torch.equal(found[1], along.tangent)


def test_the_largest_numbers_have_the_limits_of_the_formula():
    values, slopes = [-1e38, -1e13, -50.0, 50.0, 1e13, 1e38], [0, 0, 0, 1, 1, 1]
    x = torch.tensor(values).repeat(2**15).requires_grad_()
    found = gelu_tanh(x)
    assert torch.equal(found, x.clamp_min(0))
    assert torch.equal(torch.autograd.grad(found.sum(), x)[0], torch.tensor(slopes).float().repeat(2**15))
    assert gelu_tanh(torch.full((2**16,), -math.inf)).isnan().all()
