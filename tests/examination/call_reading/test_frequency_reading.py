"""The frequencies of rotary positions are read, and those that no published weights have are named."""

import pytest
import torch

from examination.subjects import case_of
from examination.whole_models import Blocks
from examination.wrong_calls import D, Rotary
from examination.wrong_constants import RotaryOfOneFrequency, RotaryRising
from regard import examine
from regard.examination.probes.order import check_case


class Frequencies(Rotary):
    """Rotary positions of these frequencies."""

    def __init__(self, inv_freq):
        super().__init__()
        self.inv_freq = inv_freq


def falling(base, width=D):
    return base ** (-torch.arange(0, D, 2) / width)


def list_results(inv_freq):
    torch.manual_seed(0)
    results = check_case(case_of(Frequencies(inv_freq)))
    return [one for one in results if not getattr(one, "what", "").startswith("the order of tokens")]


@pytest.mark.parametrize(
    ("make", "evidence"),
    [
        (RotaryOfOneFrequency, "all 3 pairs of columns are rotated by the same angles, 1 radians for each token"),
        (RotaryRising, "the frequencies of pairs of columns grow from 1 to 21.5 by factors of 4.64, and should fall"),
    ],
)
def test_wrong_frequencies_are_named_in_layers_and_models(make, evidence):
    torch.manual_seed(0)
    (finding,) = examine(make()).findings
    assert finding.kind == "wrong positions"
    assert finding.evidence == f"in the layer {evidence}"
    torch.manual_seed(0)
    findings = examine(Blocks(make)).findings
    assert [one.kind for one in findings] == ["wrong positions"]
    assert findings[0].evidence == f"in blocks.0.attention {evidence}"


@pytest.mark.parametrize("base", [10_000, 500_000, 100, 7])
def test_frequencies_that_rise_from_one_are_named_for_round_bases(base):
    (finding,) = list_results(1 / falling(base))
    largest = base ** ((D - 2) / D)
    assert f"grow from 1 to {largest:.3g}" in finding.evidence


@pytest.mark.parametrize("base", [2, 10, 100, 10_000, 1e6])
def test_falling_frequencies_are_right_for_every_base(base):
    assert not [one for one in list_results(falling(base)) if not hasattr(one, "sensitivity")]
    assert not [one for one in list_results(falling(base) / 8) if not hasattr(one, "sensitivity")]


@pytest.mark.parametrize("random", range(20))
def test_other_frequencies_are_not_accused(random):
    frequencies = torch.rand(D // 2, generator=torch.Generator().manual_seed(random)) * 4
    assert not [one for one in list_results(frequencies) if hasattr(one, "kind")]


def test_a_grid_of_positions_has_equal_frequencies_in_both_halves():
    """Pairs of rows and pairs of columns have the same frequencies, and other angles."""

    class Grid(Rotary):
        def angles(self, t):
            place = torch.stack((torch.arange(t) // 3, torch.arange(t) % 3), 1)
            return torch.cat((place * 1.0, torch.zeros(t, 1)), 1)

    torch.manual_seed(0)
    assert not [one for one in check_case(case_of(Grid())) if hasattr(one, "kind")]
