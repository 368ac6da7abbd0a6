import pytest
from torch import nn

from examination.identify.cases import case_of, make_layer
from examination.identify.functions import HARMLESS, attention, draw_grouped_inputs
from examination.identify.layers import SINGLE, TILED, UNMASKED, FusedWrongly, Plain
from regard import Everything, StackedHeads
from regard.examination.probes.heads import check_case
from regard.examination.report import Checked, Finding


def run_probe(subject, *args, **options):
    return list(check_case(case_of(subject, *args, **options)))


@pytest.mark.parametrize(
    "layer",
    [
        *(make_layer(SINGLE[key]) for key in SINGLE if key[0] in ("split", "merge")),
        make_layer(TILED, 24, 6, 2),
        make_layer(FusedWrongly),
    ],
)
def test_mixed_heads_of_a_layer_are_found(layer):
    (finding,) = run_probe(layer)
    assert isinstance(finding, Finding)
    assert (finding.kind, finding.cause) == ("mixed heads", "heads")


def test_heads_that_attend_to_one_another_are_found():
    (finding,) = run_probe(make_layer(UNMASKED["split", "tokens"]), Everything())
    assert "the heads of each token attend to one another" in finding.evidence


@pytest.mark.parametrize(
    "layer",
    [lambda: Plain(), lambda: Plain(24, 6, 2), lambda: StackedHeads(5, 7, 11, 0.0, 3), lambda: nn.MultiheadAttention(12, 3)],
)
def test_right_heads_are_checked(layer):
    assert [type(one) for one in run_probe(make_layer(layer))] == [Checked]


@pytest.mark.slow
@pytest.mark.parametrize("name", HARMLESS)
def test_heads_of_functions_outside_the_family_are_checked(name):
    assert [type(one) for one in run_probe(HARMLESS[name])] == [Checked]
    assert [type(one) for one in run_probe(HARMLESS[name], sample=draw_grouped_inputs())] == [Checked]


@pytest.mark.slow
def test_key_heads_of_a_function_in_the_wrong_order_are_found():
    (finding,) = run_probe(attention(cap=3.0, tiled=True), sample=draw_grouped_inputs())
    assert "repeated in the wrong order" in finding.evidence
    assert "repeat_interleave" in finding.cure


@pytest.mark.slow
def test_heads_of_a_function_that_answer_to_anothers_keys_are_found():
    (finding,) = run_probe(attention(heads=lambda k: k.flip(1)))
    assert finding.evidence == "changing head 0 of k moves head 2 of the output, which should not depend on it"
    (finding,) = run_probe(attention(norm=lambda s: s.softmax(-1).mean(1, keepdim=True).expand_as(s)))
    assert finding.kind == "mixed heads"


def test_heads_of_a_layer_that_does_more_than_attention_are_read_in_its_call():
    (one,) = run_probe(nn.TransformerEncoderLayer(12, 3, batch_first=True).eval(), Everything())
    assert one.what == "heads are independent: 3 of width 4"
