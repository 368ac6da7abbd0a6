import pytest
import torch
from torch import nn

from examination.identify.cases import case_of, make_layer
from examination.identify.functions import HARMLESS, attention
from examination.identify.layers import SINGLE, Fused, GPT2Like, Plain, roles
from regard.examination.probes.roles import check_case
from regard.examination.report import Checked, Finding


def run_probe(subject, *args, **options):
    return list(check_case(case_of(subject, *args, **options)))


@pytest.mark.parametrize("key", [key for key in SINGLE if key[0] == "roles"], ids=str)
def test_exchanged_roles_of_a_layer_are_found(key):
    (finding,) = run_probe(make_layer(SINGLE[key]))
    assert isinstance(finding, Finding)
    assert (finding.kind, finding.cause) == ("wrong roles", "roles")


def test_the_axes_are_identified():
    (finding,) = run_probe(make_layer(SINGLE["roles", "qkk"]))
    assert finding.evidence.startswith("the key is used as the value. The outputs equal softmax(q kᵀ / √4) k")
    (finding,) = run_probe(make_layer(roles("v", "k", "v")))
    assert finding.evidence.startswith("the value is used as the query")


def test_an_output_projection_that_is_left_out_is_found():
    (finding,) = run_probe(make_layer(SINGLE["output", "left out"]))
    assert finding.kind == "not trainable"
    assert "out_proj(context)" in finding.cure


@pytest.mark.parametrize("layer", [Plain, Fused, GPT2Like, lambda: nn.MultiheadAttention(12, 3)])
def test_right_roles_are_checked(layer):
    assert [type(one) for one in run_probe(make_layer(layer))] == [Checked]


@pytest.mark.slow
@pytest.mark.parametrize("name", HARMLESS)
def test_roles_of_functions_outside_the_family_are_checked(name):
    assert [type(one) for one in run_probe(HARMLESS[name])] == [Checked]


@pytest.mark.slow
def test_an_exchange_in_a_function_shows_in_its_weights():
    (finding,) = run_probe(attention(cap=3.0, exchanged=True))
    assert "queries and keys are exchanged" in finding.evidence


@pytest.mark.slow
@pytest.mark.parametrize(("place", "name"), [(0, "query"), (1, "query and the key"), (2, "value")])
def test_an_input_that_nothing_hangs_on_is_found(place, name):
    function = attention(cap=3.0)

    def wrong(*inputs):
        given = list(inputs)
        given[place] = torch.ones_like(given[place])
        return function(*given)

    (finding,) = run_probe(wrong)
    assert finding.evidence == f"the output does not change with the {name}"
