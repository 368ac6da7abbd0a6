"""A softmax of powers of 2 is recorded with the scale that gives its weights, as a softmax of powers of e is."""

import math

import pytest
import torch
from torch import Tensor, nn

from observe.interception.handwritten.handwritten_attention import CAUSAL, B, C, Own, T
from observe.recording_checks import EQUAL, compute_weights, record_and_compare

pytestmark = pytest.mark.usefixtures("in_float64")
LOG2_E = math.log2(math.e)
POWERS = {
    "exp2": torch.exp2,
    "special.exp2": torch.special.exp2,
    "exp2 in place": Tensor.exp2_,
    "2 ** x": lambda x: 2**x,
    "2.0 ** x": lambda x: 2.0**x,
    "pow": lambda x: torch.pow(2, x),
}


class PowerSoftmax(nn.Module):
    """softmax(q kᵀ / √d) v, by powers of a base whose exponents have the factor 1 / log(base)."""

    def __init__(self, power, factor: float, is_divided_late: bool, is_causal: bool) -> None:
        super().__init__()
        self.power, self.factor = power, factor
        self.is_divided_late, self.is_causal = is_divided_late, is_causal
        self.q = self.k = torch.empty(0)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.q, self.k = q.detach(), k.detach()
        exponents = q @ k.mT * (self.factor / math.sqrt(q.shape[-1]))
        exponents = exponents.masked_fill(~CAUSAL, -torch.inf) if self.is_causal else exponents
        powers = self.power(exponents - exponents.amax(-1, keepdim=True))
        total = powers.sum(-1, keepdim=True)
        return powers @ v / total if self.is_divided_late else powers / total @ v


def assert_exact(power, factor: float, is_divided_late: bool = False, is_causal: bool = False) -> None:
    attend = PowerSoftmax(power, factor, is_divided_late, is_causal)
    model = nn.Sequential(Own((lambda q, k, v, part: part(q, k, v), attend)))
    recording, _ = record_and_compare(model, lambda m: m(torch.randn(B, T, C)))
    assert not recording.notes
    found = recording.map(0)
    assert found.planes.request.bias is None
    expected = compute_weights(attend.q, attend.k, CAUSAL if is_causal else None)
    assert (found.dense() - expected).abs().max() < EQUAL


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("is_divided_late", [False, True])
@pytest.mark.parametrize("power", POWERS.values(), ids=POWERS)
def test_a_softmax_of_powers_of_two_is_recorded_without_stored_weights(power, is_divided_late, is_causal):
    assert_exact(power, LOG2_E, is_divided_late, is_causal)


@pytest.mark.parametrize("power", [lambda x: math.e**x, lambda x: torch.pow(math.e, x)], ids=["e ** x", "pow"])
def test_a_softmax_of_powers_of_e_is_recorded_without_stored_weights(power):
    assert_exact(power, 1.0)
