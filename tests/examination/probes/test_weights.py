import pytest
import torch
from torch import nn

from examination import right_designs as designs
from examination.identify.cases import case_of, make_layer
from examination.identify.functions import HARMLESS, attention
from examination.identify.layers import SINGLE, UNMASKED, Plain
from examination.identify.test_weight_reading import Shown
from regard import Everything
from regard.examination.probes.weights import check_case
from regard.examination.report import Checked, Finding, Unknown


def run_probe(subject, *args, **options):
    return list(check_case(case_of(subject, *args, **options)))


def kinds(subject, *args, **options):
    return [one.kind for one in run_probe(subject, *args, **options) if isinstance(one, Finding)]


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        (("mask", "zero"), "future leak"),
        (("mask", "one added"), "future leak"),
        (("mask", "minus one"), "future leak"),
        (("mask", "zeroed weights"), "not normalised"),
        (("norm", "none"), "not normalised"),
        (("norm", "sigmoid"), "not normalised"),
        (("norm", "twice"), "not normalised"),
        (("norm", "exp"), "not normalised"),
    ],
)
def test_what_identification_names_is_a_finding(key, kind):
    (finding,) = [one for one in run_probe(make_layer(SINGLE[key])) if isinstance(one, Finding)]
    assert finding.kind == kind
    assert finding.strength > 2
    assert "The outputs equal" in finding.evidence


@pytest.mark.parametrize("axis", ["queries", "heads", "batch"])
def test_a_softmax_over_another_axis_is_found(axis):
    assert kinds(make_layer(UNMASKED["axis", axis]), Everything()) == ["wrong axis"]


def test_a_right_layer_is_checked_and_says_how_exactly():
    (one,) = run_probe(make_layer(Plain))
    assert isinstance(one, Checked)
    assert "equals softmax" in one.sensitivity


@pytest.mark.slow
@pytest.mark.parametrize("name", HARMLESS)
def test_softcap_bias_and_sinks_are_no_faults(name):
    (one,) = run_probe(HARMLESS[name])
    sinks = name in ("sink", "sink and bias", "everything")
    assert isinstance(one, Unknown if sinks else Checked)
    assert ("as with a sink" in one.what) == sinks


@pytest.mark.slow
def test_softmaxes_before_heads_are_mixed_are_checked():
    (one,) = run_probe(make_layer(designs.TalkingHeads))
    assert isinstance(one, Checked)
    assert "rows of each softmax sum to one, over the keys; the heads are mixed after it" in one.what


@pytest.mark.slow
def test_heads_subtracted_in_a_function_cannot_be_determined():
    (one,) = run_probe(designs.differential)
    assert isinstance(one, Unknown)
    assert "mixed or subtracted heads" in one.what


@pytest.mark.slow
def test_functions_outside_the_family_are_read():
    assert kinds(attention(cap=3.0, zeroed=True)) == ["not normalised"]
    assert kinds(attention(cap=3.0, norm=torch.sigmoid)) == ["not normalised"]
    assert kinds(attention(cap=3.0, norm=lambda s: s.softmax(-1) / 2)) == ["not normalised"]
    assert kinds(attention(cap=3.0, norm=lambda s: s.softmax(-2))) == ["wrong axis"]
    assert kinds(attention(cap=3.0, norm=lambda s: s.masked_fill(s == -torch.inf, 0))) == ["not normalised"]


@pytest.mark.slow
def test_the_row_that_does_not_add_to_one_is_reported():
    (finding,) = [one for one in run_probe(attention(cap=3.0, norm=lambda s: s.softmax(-1) / 2)) if isinstance(one, Finding)]
    assert "the weights of row 0 of head 0 sum to 0.5, not to 1" in finding.evidence


@pytest.mark.slow
def test_weights_that_a_layer_returns_are_read_where_nothing_matches():
    assert isinstance(run_probe(make_layer(Shown))[0], Checked)

    class Loud(Shown):
        def softmax(self, scores):
            return scores.softmax(-1) * 2

    assert kinds(make_layer(Loud)) == ["not normalised"]


class Beside(Plain):
    """A residual beside it: nothing matches, and nothing is returned but the sum."""

    def forward(self, x):
        return x + super().forward(x)


@pytest.mark.slow
def test_constant_sequences_find_rows_that_hang_on_hidden_tokens():
    class Zeroed(Beside):
        def mask(self, scores, t):
            return scores

        def softmax(self, scores):
            return scores.softmax(-1).tril()

    assert kinds(make_layer(Zeroed)) == ["not normalised"]


def test_positions_beside_attention_are_no_fault_and_its_call_is_read():
    class Placed(Beside):
        def __init__(self):
            super().__init__()
            self.places = nn.Parameter(torch.randn(20, 12))

        def forward(self, x):
            return super().forward(x + self.places[: x.shape[1]])

    (found,) = run_probe(make_layer(Placed))
    assert found.what == "rows of weights sum to one, over the keys"
    assert "in 1 recorded call" in found.sensitivity
