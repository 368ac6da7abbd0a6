import pytest
import torch
from torch import nn

import regard
from examination.identify.cases import case_of, made
from examination.identify.functions import HARMLESS, attention
from examination.identify.layers import SINGLE, Plain, nothing, wrong
from examination.identify.test_weight_reading import Shown
from regard import Everything
from regard.examination.probes.scale import check_case
from regard.examination.report import Checked, Finding, Unknown


def said(subject, *args, **options):
    (one,) = check_case(case_of(subject, *args, **options))
    return one


@pytest.mark.parametrize("name", ["none", "twice", "multiplied", "model", "tokens", "after"])
def test_a_wrong_scale_is_found_with_its_cure(name):
    finding = said(made(SINGLE["scale", name]))
    assert isinstance(finding, Finding)
    assert (finding.kind, finding.cause) == ("wrong scale", "scale")
    assert "math.sqrt(k.shape[-1])" in finding.cure


def test_the_width_of_the_model_in_the_place_of_the_heads_is_reported():
    assert "√12, where 12 is the width of all heads, not of one" in said(made(SINGLE["scale", "model"])).evidence


def test_a_right_scale_is_checked():
    assert isinstance(said(made(Plain)), Checked)
    assert isinstance(said(regard.SimpleSelfAttention(), Everything()), Checked)


@pytest.mark.slow
def test_a_stated_scale_is_no_fault():
    assert isinstance(said(made(SINGLE["scale", "none"]), scale=1.0), Checked)
    assert isinstance(said(attention(scale=2.0, cap=3.0), scale=2 / 8**0.5), Checked)
    assert isinstance(said(made(Plain), scale=1.0), Finding)


@pytest.mark.slow
@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_added_to_scores_hides_no_scale(name):
    assert isinstance(said(HARMLESS[name]), Checked)


@pytest.mark.slow
@pytest.mark.parametrize("beside", [{"cap": 3.0}, {"slope": 0.5}, {"sink": 0.3}, {"cap": 3.0, "exchanged": True}])
def test_a_wrong_scale_of_a_function_is_measured(beside):
    finding = said(attention(scale=2.0, **beside))
    assert isinstance(finding, Finding)
    assert "0.70" in finding.evidence
    assert "pass scale=0.70" in finding.cure


@pytest.mark.slow
def test_returned_weights_show_the_scale_beside_a_residual():
    assert isinstance(said(made(Shown)), Checked)
    assert isinstance(said(made(type("Unscaled", (Shown,), {"scale": nothing}))), Finding)


@pytest.mark.slow
def test_what_cannot_be_determined_says_what_to_pass():
    one = said(attention(turn=lambda x: x / x.norm(dim=-1, keepdim=True)))
    assert isinstance(one, Unknown)
    assert "W_query" in one.needs


def test_the_scale_of_a_layer_that_does_more_than_attention_is_read_in_its_call():
    one = said(nn.TransformerEncoderLayer(12, 3, batch_first=True).eval(), Everything())
    assert one.what == "the scale of the scores, 0.5"
    assert isinstance(said(made(wrong(forward=lambda self, x: x + Plain.forward(self, x)))), Checked)


def test_keys_of_zero_leave_the_scale_unknown():
    layer = made(Plain)
    with torch.no_grad():
        layer.W_key.weight.zero_()
        layer.W_key.bias.zero_()
    assert isinstance(said(layer), Unknown)
