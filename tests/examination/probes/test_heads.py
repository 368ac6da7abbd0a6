import pytest
from torch import nn

from examination.identify.cases import case_of, made
from examination.identify.functions import HARMLESS, attention, grouped
from examination.identify.layers import SINGLE, TILED, UNMASKED, FusedWrongly, Plain
from regard import Everything, StackedHeads
from regard.examination.probes.heads import check_case
from regard.examination.report import Checked, Finding


def said(subject, *args, **options):
    return list(check_case(case_of(subject, *args, **options)))


@pytest.mark.parametrize(
    "layer", [*(made(SINGLE[key]) for key in SINGLE if key[0] in ("split", "merge")), made(TILED, 24, 6, 2), made(FusedWrongly)]
)
def test_mixed_heads_of_a_layer_are_found(layer):
    (finding,) = said(layer)
    assert isinstance(finding, Finding)
    assert (finding.kind, finding.cause) == ("mixed heads", "heads")


def test_heads_that_attend_to_one_another_are_found():
    (finding,) = said(made(UNMASKED["split", "tokens"]), Everything())
    assert "the heads of each token attend to one another" in finding.evidence


def test_which_of_q_k_and_v_are_viewed_is_reported():
    (finding,) = said(made(SINGLE["split", "v"]))
    assert finding.evidence.startswith("v are split into heads by a view")
    assert ".transpose(1, 2)" in finding.cure


@pytest.mark.parametrize(
    "layer",
    [lambda: Plain(), lambda: Plain(24, 6, 2), lambda: StackedHeads(5, 7, 11, 0.0, 3), lambda: nn.MultiheadAttention(12, 3)],
)
def test_right_heads_are_checked(layer):
    assert [type(one) for one in said(made(layer))] == [Checked]


def test_one_head_has_nothing_to_mix():
    assert not said(made(Plain, 12, 1))


@pytest.mark.slow
@pytest.mark.parametrize("name", HARMLESS)
def test_heads_of_functions_outside_the_family_are_checked(name):
    assert [type(one) for one in said(HARMLESS[name])] == [Checked]
    assert [type(one) for one in said(HARMLESS[name], sample=grouped())] == [Checked]


@pytest.mark.slow
def test_key_heads_of_a_function_in_the_wrong_order_are_found():
    (finding,) = said(attention(cap=3.0, tiled=True), sample=grouped())
    assert "repeated in the wrong order" in finding.evidence
    assert "repeat_interleave" in finding.cure


@pytest.mark.slow
def test_heads_of_a_function_that_answer_to_anothers_keys_are_found():
    (finding,) = said(attention(heads=lambda k: k.flip(1)))
    assert finding.evidence == "changing head 0 of k moves head 2 of the output, which should not depend on it"
    (finding,) = said(attention(norm=lambda s: s.softmax(-1).mean(1, keepdim=True).expand_as(s)))
    assert finding.kind == "mixed heads"


def test_heads_of_a_layer_that_does_more_than_attention_are_read_in_its_call():
    (one,) = said(nn.TransformerEncoderLayer(12, 3, batch_first=True).eval(), Everything())
    assert one.what == "heads are independent: 3 of width 4"
