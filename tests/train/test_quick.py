import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.models.gpt2 import ACTIVATIONS
from regard.train import quick

pytest.importorskip("numba", reason="the loops need numba, which is not installed")

ROWS, N = 97, 1009
TORCHS = ACTIVATIONS["gelu_tanh"]


def logits_and_targets(dtype=torch.float32, size=4.0):
    torch.manual_seed(2)
    logits = (torch.randn(ROWS, N) * size).to(dtype).requires_grad_()
    targets = torch.randint(0, N, (ROWS,))
    targets[::7] = quick.NONE
    return logits, targets


def exact(logits, targets, smoothing=0.0):
    wide = logits.detach().double().requires_grad_()
    loss = F.cross_entropy(wide, targets, ignore_index=quick.NONE, reduction="sum", label_smoothing=smoothing)
    return loss, torch.autograd.grad(3 * loss, wide)[0]


@pytest.mark.parametrize("size", [0.0, 4.0, 300.0])
def test_cross_entropy_and_its_gradient_are_those_of_float64(size):
    logits, targets = logits_and_targets(size=size)
    loss = quick.cross_entropy(logits, targets)
    (grad,) = torch.autograd.grad(3 * loss, logits)
    expected, slope = exact(logits, targets)
    torch.testing.assert_close(loss.double(), expected, rtol=3e-7, atol=0)
    torch.testing.assert_close(grad.double(), slope, rtol=0, atol=2e-6 * max(size, 1))  # a logit of 300 has steps of 3e-5


@pytest.mark.parametrize("rows", [ROWS, 3])  # by the loops, and by torch
def test_smoothed_cross_entropy_and_its_gradient_are_those_of_float64(rows):
    logits, targets = (x[:rows] for x in logits_and_targets())
    loss = quick.cross_entropy(logits, targets, 0.3)
    (grad,) = torch.autograd.grad(3 * loss, logits)
    expected, slope = exact(logits, targets, 0.3)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(grad.double(), slope, rtol=0, atol=8e-6)


def test_of_bfloat16_the_loss_is_that_of_its_numbers_and_the_gradient_is_rounded_once():
    logits, targets = logits_and_targets(torch.bfloat16)
    loss = quick.cross_entropy(logits, targets)
    wide = logits.detach().float().requires_grad_()
    expected = quick.cross_entropy(wide, targets)
    assert torch.equal(loss, expected)
    assert torch.equal(*(torch.autograd.grad(x, leaf)[0].bfloat16() for x, leaf in ((loss, logits), (expected, wide))))


def test_a_row_without_a_target_adds_nothing_and_asks_for_nothing():
    logits, targets = logits_and_targets()
    whole = quick.cross_entropy(logits, targets)
    with torch.no_grad():
        logits[::7] = torch.inf  # whatever stands there
    found = quick.cross_entropy(logits, targets)
    assert torch.equal(found, whole)
    assert not torch.autograd.grad(found, logits)[0][::7].any()


def test_a_nan_is_not_lost():
    logits, targets = logits_and_targets()
    with torch.no_grad():
        logits[1, 5] = torch.nan
    assert quick.cross_entropy(logits, targets).isnan()


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 40), st.floats(0.1, 40))
def test_gelu_and_its_gradient_are_those_of_float64(runs, size):
    torch.manual_seed(runs)
    x = (torch.randn(runs * 2**11 + 2**16 + 3) * size).requires_grad_()
    seed = torch.randn_like(x)
    found = quick.gelu(x)
    wide = x.detach().double().requires_grad_()
    expected = F.gelu(wide, approximate="tanh")
    torch.testing.assert_close(found.double(), expected, rtol=torch.finfo(torch.float32).eps, atol=1e-7)  # one rounding
    slope, (grad,) = torch.autograd.grad(expected, wide, seed.double())[0], torch.autograd.grad(found, x, seed)
    (own,) = torch.autograd.grad(TORCHS(x), x, seed)
    assert (grad - slope).abs().max() <= 2 * (own - slope).abs().max() + 1e-6  # float32 is what torch has too


def test_of_bfloat16_gelu_is_that_of_float32_rounded_once():
    torch.manual_seed(1)
    x = (torch.randn(313, 401) * 3).bfloat16()
    assert torch.equal(quick.gelu(x), quick.gelu(x.float()).bfloat16())


def test_what_the_loops_do_not_know_goes_through_torch():
    x = torch.randn(313, 401, dtype=torch.float64, requires_grad=True)
    assert torch.equal(quick.gelu(x), TORCHS(x))
    assert torch.autograd.gradcheck(quick.gelu, x[:3, :4].detach().requires_grad_())
    assert torch.equal(torch.func.vmap(quick.gelu)(x.float()), TORCHS(x.float()))
