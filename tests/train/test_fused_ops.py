import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from bounds import EXPONENTIAL, SMALLEST, assert_within, cross_entropy_bounds, gamma, unit_roundoff
from example_count import limit_examples
from regard.models.gpt2 import ACTIVATIONS
from regard.train import fused_ops
from skips import NEEDS_LOOPS

pytestmark = NEEDS_LOOPS

ROWS, N = 97, 1009
TORCHS = ACTIVATIONS["gelu_tanh"]


def logits_and_targets(dtype=torch.float32, size=4.0):
    torch.manual_seed(2)
    logits = (torch.randn(ROWS, N) * size).to(dtype).requires_grad_()
    targets = torch.randint(0, N, (ROWS,))
    targets[::7] = fused_ops.NO_TARGET
    return logits, targets


def exact(logits, targets, smoothing=0.0):
    wide = logits.detach().double().requires_grad_()
    loss = F.cross_entropy(wide, targets, ignore_index=fused_ops.NO_TARGET, reduction="sum", label_smoothing=smoothing)
    return loss, torch.autograd.grad(3 * loss, wide)[0]


def loss_bounds(logits, targets, smoothing=0.0):
    """The bounds of the loss and of three times its gradient; the loops add up rows in float64, torch in float32."""
    terms = 1 if fused_ops.can_use_loops(logits) else len(logits)
    loss, slope = cross_entropy_bounds(torch.float32, logits, targets, terms=terms, smoothing=smoothing)
    return loss, 3 * slope


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


@pytest.mark.slow
@pytest.mark.emulated
@pytest.mark.parametrize("size", [0.0, 4.0, 300.0])
def test_cross_entropy_and_its_gradient_are_those_of_float64(size):
    logits, targets = logits_and_targets(size=size)
    loss = fused_ops.cross_entropy(logits, targets)
    (grad,) = torch.autograd.grad(3 * loss, logits)
    for found, expected, most in zip((loss, grad), exact(logits, targets), loss_bounds(logits, targets), strict=True):
        assert_within(found, expected, most)


@pytest.mark.parametrize("rows", [ROWS, 3])  # by the loops, and by torch
def test_smoothed_cross_entropy_and_its_gradient_are_those_of_float64(rows):
    logits, targets = (x[:rows] for x in logits_and_targets())
    loss = fused_ops.cross_entropy(logits, targets, 0.3)
    (grad,) = torch.autograd.grad(3 * loss, logits)
    for found, expected, most in zip((loss, grad), exact(logits, targets, 0.3), loss_bounds(logits, targets, 0.3), strict=True):
        assert_within(found, expected, most)


@pytest.mark.slow
@pytest.mark.emulated
def test_of_bfloat16_the_loss_is_that_of_its_numbers_and_the_gradient_is_rounded_once():
    logits, targets = logits_and_targets(torch.bfloat16)
    loss = fused_ops.cross_entropy(logits, targets)
    (grad,) = torch.autograd.grad(3 * loss, logits)
    (expected, slope), (most, rounding) = exact(logits, targets), loss_bounds(logits, targets)
    assert grad.dtype == torch.bfloat16
    assert_within(loss, expected, most)
    assert_within(grad, slope, rounding + unit_roundoff(torch.bfloat16) * (slope.abs() + rounding))


def test_a_row_without_a_target_adds_nothing_and_asks_for_nothing():
    logits, targets = logits_and_targets()
    whole = fused_ops.cross_entropy(logits, targets)
    with torch.no_grad():
        logits[::7] = torch.inf  # whatever stands there
    found = fused_ops.cross_entropy(logits, targets)
    assert torch.equal(found, whole)
    assert not torch.autograd.grad(found, logits)[0][::7].any()


def test_a_nan_is_not_lost():
    logits, targets = logits_and_targets()
    with torch.no_grad():
        logits[1, 5] = torch.nan
    assert fused_ops.cross_entropy(logits, targets).isnan()


@settings(max_examples=limit_examples(20), deadline=None)
@given(st.integers(1, 40), st.floats(0.1, 40))
def test_gelu_and_its_gradient_are_those_of_float64(runs, size):
    torch.manual_seed(runs)
    x = (torch.randn(runs * 2**11 + 2**16 + 3) * size).requires_grad_()
    seed = torch.randn_like(x)
    found = fused_ops.gelu(x)
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
    found = fused_ops.gelu(x)
    assert found.dtype == torch.bfloat16
    assert_within(found, expected, rounding + unit_roundoff(torch.bfloat16) * (expected.abs() + rounding))


def test_what_the_loops_do_not_know_goes_through_torch():
    x = torch.randn(313, 401, dtype=torch.float64, requires_grad=True)
    assert torch.equal(fused_ops.gelu(x), TORCHS(x))
    assert torch.autograd.gradcheck(fused_ops.gelu, x[:3, :4].detach().requires_grad_())
    assert torch.equal(torch.func.vmap(fused_ops.gelu)(x.float()), TORCHS(x.float()))
