"""Factors are solved for by least squares, and numbers that are not finite are not handed to LAPACK, which would print."""

import pytest
import torch

from examination.subjects import later
from regard import MultiHeadAttention
from regard.examination import examine
from regard.examination.call_reading.rounding import solve_least_squares


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", ["a", "b"])
def test_numbers_that_are_not_finite_have_no_solution_and_print_nothing(number, place, capfd):
    numbers = {"a": torch.ones(7, 2), "b": torch.ones(7)}
    numbers[place].view(-1)[3] = number
    assert solve_least_squares(**numbers) is None
    assert capfd.readouterr() == ("", "")


class StrictlyCausal(MultiHeadAttention):
    """Heads whose queries do not see their own token, so that the first output is NaN."""

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (4, 6)).transpose(1, 2) for f in (self.W_query, self.W_key, self.W_value))
        weights = (q @ k.mT / 6**0.5).masked_fill(later(x.shape[1], x.shape[1], 0), -torch.inf).softmax(-1)
        return self.out_proj((weights @ v).transpose(1, 2).flatten(2))


def test_nothing_is_printed_of_a_layer_whose_outputs_are_nan(capfd):
    assert "blind row" in [one.kind for one in examine(StrictlyCausal(24, 24, 16, 0.0, 4)).findings]
    assert capfd.readouterr() == ("", "")
