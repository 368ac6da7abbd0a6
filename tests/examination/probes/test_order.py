"""The order of tokens: it matters where positions enter, and nowhere else."""

import pytest
import torch

from examination import wrong_positions as wrong
from examination.identify import cases
from examination.right_plain import Alibi, LearnedBias, Positions, Rotary, Sinusoids
from examination.subjects import Layer, hiding, later
from regard import Everything, Window
from regard.examination.probes.order import check_case, find_position_tensors
from regard.examination.report import Checked, Finding, Unknown


def run_probe(subject, *args, **options):
    return list(check_case(cases.case_of(subject, *args, **options)))


def make_seeded_model(make):
    torch.manual_seed(3)
    return make().eval()


class Ruled(Layer):
    """Causal, with a bias for each query and key."""

    def __init__(self, bias):
        super().__init__(lambda scores: hiding(later)(scores + bias(*scores.shape[-2:]).to(scores)))


def compute_bias_by_distance(q, k):
    return -(torch.arange(q)[:, None] - torch.arange(k)).double() / 3


def compute_bias_by_place(q, k):
    return -(torch.arange(k).double() ** 2) / 9


def test_without_positions_the_order_does_not_matter():
    (one,) = run_probe(Layer(hiding(later)))
    assert isinstance(one, Checked)
    assert "does not matter" in one.what


@pytest.mark.slow
def test_what_depends_on_order_and_holds_no_positions_cannot_be_determined():
    (one,) = run_probe(Ruled(compute_bias_by_place))
    assert isinstance(one, Unknown)
    assert "reordering tokens " in one.what


@pytest.mark.slow
def test_a_slope_that_is_made_as_it_runs_is_read_in_the_calls():
    (one,) = run_probe(Ruled(compute_bias_by_distance))
    assert isinstance(one, Checked)
    assert one.what == "a bias falls with the distance of a key, slope 0.333"


@pytest.mark.slow
@pytest.mark.parametrize("make", [Rotary, Alibi, Sinusoids])
def test_positions_that_are_made_as_it_runs_are_not_found_in_a_module(make):
    assert not find_position_tensors(make_seeded_model(make))
    (one,) = run_probe(make_seeded_model(make), *([Everything()] if make is Sinusoids else []))
    assert isinstance(one, Unknown if make is Sinusoids else Checked)  # rotations and slopes are read in the calls


@pytest.mark.parametrize(("make", "name"), [(Positions, "positions.weight"), (LearnedBias, "relative.weight")])
def test_positions_that_are_held_and_enter_are_checked(make, name):
    (one,) = run_probe(make_seeded_model(make), *([Everything()] if make is LearnedBias else []))
    assert isinstance(one, Checked)
    assert one.sensitivity.endswith(f"there is {name}")


def test_keys_that_alone_are_rotated_are_named():
    assert not [one for one in run_probe(make_seeded_model(wrong.Rotary)) if isinstance(one, Finding)]
    (one,) = run_probe(make_seeded_model(wrong.RotaryOfKeys))
    assert isinstance(one, Finding)
    assert "only keys are rotated by their positions" in one.evidence


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (wrong.RotaryByHead, "inv_freq"),
        (wrong.RotaryOfQueries, "inv_freq"),
        (wrong.PositionsAllZero, "positions.weight"),
        (wrong.AlibiOfQueries, "slopes"),
    ],
)
def test_positions_that_are_one_for_all_keys_are_found(make, name):
    (one,) = run_probe(make_seeded_model(make))
    assert isinstance(one, Finding)
    assert (one.kind, one.cause) == ("wrong positions", "positions")
    assert f"though {name} is used" in one.evidence


class Near(wrong.AlibiOfQueries):
    """A penalty for distance, before and after alike, or for what comes before alone."""

    def __init__(self, hidden, before):
        super().__init__()
        self.hidden, self.before = hidden, before

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, wrong.H, wrong.D).permute(2, 0, 3, 1, 4)
        back = torch.arange(t)[:, None] - torch.arange(t)
        scores = q @ k.mT / wrong.D**0.5 - self.slopes * (back.clamp_min(0) if self.before else back.abs())
        weights = scores.masked_fill(~self.hidden.table(t, t), -torch.inf).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    ("rule", "before"), [(Window(1, 1), False), (Window(2, 2), False), (Everything(), False), (Everything(), True)], ids=str
)
def test_distance_that_is_the_same_before_and_after_is_no_fault(rule, before):
    assert not [one for one in run_probe(make_seeded_model(lambda: Near(rule, before)), rule) if isinstance(one, Finding)]


@pytest.mark.slow
def test_mixing_that_an_opposite_order_leaves_alone_is_no_mixing_without_positions():
    class Fourier(Layer):
        def forward(self, x):
            return torch.fft.fft(torch.fft.fft(x, dim=-1), dim=-2).real

    (one,) = run_probe(Fourier(None), Everything())
    assert isinstance(one, Unknown)
