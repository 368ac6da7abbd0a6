import pytest
import torch
import torch.nn.functional as F

from bounds import assert_within, cross_entropy_bounds, unit_roundoff
from regard.train import fused_ops
from skips import NEEDS_LOOPS

pytestmark = NEEDS_LOOPS

ROWS, N = 97, 1009


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
