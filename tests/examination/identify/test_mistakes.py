import dataclasses

import pytest
import torch

from examination.identify.cases import identify_subject, make_layer
from examination.identify.layers import SINGLE, Plain, wrong
from regard.examination.identify.mistakes import CAUSES, describe_evidence, find_mistake, format_formula
from regard.examination.identify.variants import ProjectedInputs, list_choices

KINDS = {
    *("future leak", "wrong mask", "inverted mask", "wrong scale", "wrong axis"),
    *("not normalised", "mixed heads", "wrong roles", "not trainable"),
}


def test_every_deviation_has_a_kind_a_sentence_and_a_cure():
    match = identify_subject(make_layer(Plain))
    q, k = torch.randn(2, 5, 12), torch.randn(2, 5, 4)
    given = ProjectedInputs(q, k, k, q, 6, 2, torch.ones(1, 1, 5, 5, dtype=torch.bool).tril(), 0.7, whole=q)
    for field, values in list_choices(given, has_known_roles=True, output=True, has_separate_heads=False).items():
        for value in values:
            object.__setattr__(match, "variant", type(match.variant)(**{field: value}))
            found = find_mistake(match, field)
            assert found.kind in KINDS
            assert found.does
            assert found.cure
            assert field in CAUSES


@pytest.mark.parametrize(
    ("key", "written"),
    [
        (None, "softmax(q kᵀ / √4) v with 3 heads"),
        (("scale", "none"), "softmax(q kᵀ) v with 3 heads"),
        (("scale", "after"), "softmax(q kᵀ) / √4 v with 3 heads"),
        (("norm", "sigmoid"), "sigmoid(q kᵀ / √4) v with 3 heads"),
        (("norm", "twice"), "softmax(softmax(q kᵀ / √4)) v with 3 heads"),
        (("roles", "turned"), "softmax(q kᵀ / √4)ᵀ v with 3 heads"),
        (("roles", "kqv"), "softmax(k qᵀ / √4) v with 3 heads"),
    ],
)
def test_a_match_is_written_as_its_formula(key, written):
    assert format_formula(identify_subject(make_layer(Plain if key is None else SINGLE[key]))) == written


def test_evidence_says_how_exactly_and_how_far_from_right():
    match = identify_subject(make_layer(SINGLE["scale", "none"]))
    told = describe_evidence(match, "scale")
    assert told.startswith(
        "the scores are not scaled. The outputs equal softmax(q kᵀ) v with 3 heads computed this way to within "
    )
    assert f"differs by {match.right_error:.2g}" in told
    assert "to within 1e-16" in describe_evidence(dataclasses.replace(match, error=0.0), "scale")  # no error has no digits


@pytest.mark.slow
def test_a_scale_without_a_name_is_reported_beside_the_expected_one():
    match = identify_subject(make_layer(wrong(scale=lambda self, s, t: s * 0.3)))
    assert find_mistake(match, "scale").does == "the scores are multiplied by 0.3, but 0.5 is expected"
    assert "pass scale=0.3" in find_mistake(match, "scale").cure
