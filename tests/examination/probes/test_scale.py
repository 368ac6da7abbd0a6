import pytest
import torch
from torch import nn

import regard
from examination.identify.cases import case_of, make_layer
from examination.identify.functions import HARMLESS, attention
from examination.identify.layers import SINGLE, Plain, nothing, wrong
from examination.identify.test_weight_reading import Shown
from regard import Everything
from regard.examination.call_checks.scale_checks import is_near
from regard.examination.probes.scale import check_case
from regard.examination.report import Checked, Finding, Unknown


def run_probe(subject, *args, **options):
    (one,) = check_case(case_of(subject, *args, **options))
    return one


@pytest.mark.parametrize("name", ["none", "twice", "multiplied", "model", "tokens", "after"])
def test_a_wrong_scale_is_found_with_its_cure(name):
    finding = run_probe(make_layer(SINGLE["scale", name]))
    assert isinstance(finding, Finding)
    assert (finding.kind, finding.cause) == ("wrong scale", "scale")
    assert "math.sqrt(k.shape[-1])" in finding.cure


def test_a_right_scale_is_checked():
    assert isinstance(run_probe(make_layer(Plain)), Checked)
    assert isinstance(run_probe(regard.SimpleSelfAttention(), Everything()), Checked)


@pytest.mark.slow
def test_a_stated_scale_is_no_fault():
    assert isinstance(run_probe(make_layer(SINGLE["scale", "none"]), scale=1.0), Checked)
    assert isinstance(run_probe(attention(scale=2.0, cap=3.0), scale=2 / 8**0.5), Checked)
    assert isinstance(run_probe(make_layer(Plain), scale=1.0), Finding)


@pytest.mark.slow
@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_added_to_scores_hides_no_scale(name):
    assert isinstance(run_probe(HARMLESS[name]), Checked)


@pytest.mark.slow
@pytest.mark.parametrize("beside", [{"cap": 3.0}, {"slope": 0.5}, {"sink": 0.3}, {"cap": 3.0, "exchanged": True}])
def test_a_wrong_scale_of_a_function_is_measured(beside):
    finding = run_probe(attention(scale=2.0, **beside))
    assert isinstance(finding, Finding)
    assert "0.70" in finding.evidence
    assert "pass scale=0.70" in finding.cure


@pytest.mark.slow
def test_returned_weights_show_the_scale_beside_a_residual():
    assert isinstance(run_probe(make_layer(Shown)), Checked)
    assert isinstance(run_probe(make_layer(type("Unscaled", (Shown,), {"scale": nothing}))), Finding)


@pytest.mark.slow
def test_what_cannot_be_determined_says_what_to_pass():
    one = run_probe(attention(turn=lambda x: x / x.norm(dim=-1, keepdim=True)))
    assert isinstance(one, Unknown)
    assert "W_query" in one.needs


def test_the_scale_of_a_layer_that_does_more_than_attention_is_read_in_its_call():
    one = run_probe(nn.TransformerEncoderLayer(12, 3, batch_first=True).eval(), Everything())
    assert one.what == "the scale of the scores, 0.5"
    assert isinstance(run_probe(make_layer(wrong(forward=lambda self, x: x + Plain.forward(self, x)))), Checked)


class ScaledHeads(nn.Module):
    """Causal heads written by hand, with any factor on the scores."""

    def __init__(self, heads, width, scale):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(heads * width, heads * width) for _ in range(4))
        self.heads, self.factor = heads, scale

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        weights = (q @ k.mT * self.factor).masked_fill(hidden, -torch.inf).softmax(-1)
        return self.o_proj((weights @ v).transpose(1, 2).flatten(2))


def test_a_scale_of_0_is_a_wrong_scale():
    torch.manual_seed(0)
    findings = regard.examine(ScaledHeads(3, 5, 0.0)).findings
    assert [one.kind for one in findings if one.cause == "scale"] == ["wrong scale"]
    assert "multiplied by 0, not by 1 / √5" in findings[0].evidence


@pytest.mark.parametrize("expected", [0.0, 0.5])
def test_a_scale_is_compared_with_any_expected_one_also_with_0(expected):
    assert is_near(expected, expected)
    assert not is_near(expected + 0.1, expected)
