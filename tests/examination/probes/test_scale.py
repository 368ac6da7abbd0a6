import pytest
import torch
from torch import nn

import regard
from examination.identify.cases import case_of, make_layer
from examination.identify.functions import HARMLESS, attention
from examination.identify.layers import SINGLE, Plain, nothing, wrong
from examination.identify.test_weight_reading import Shown
from regard import Everything
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


def test_the_width_of_the_model_in_the_place_of_the_heads_is_reported():
    assert "√12, where 12 is the width of all heads, not of one" in run_probe(make_layer(SINGLE["scale", "model"])).evidence


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


def test_keys_of_zero_leave_the_scale_unknown():
    layer = make_layer(Plain)
    with torch.no_grad():
        layer.W_key.weight.zero_()
        layer.W_key.bias.zero_()
    assert isinstance(run_probe(layer), Unknown)
