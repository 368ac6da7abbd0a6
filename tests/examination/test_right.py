"""Nothing is found of right layers, whatever they are made of."""

import pytest

from examination.right import RIGHT
from regard.examination import examine

INCONCLUSIVE = {  # of which the scale does not show (keys are latent, there is one token)
    *("MultiHeadAttention of one token at most", "differential"),
    "GatedUnit",  # no softmax
    "SharedQueriesAndKeys",  # keys are normalized, queries are not
    "deberta-v2: places apart",  # whose scale is 1 / √(3 d), which is asked
}
EVERYDAY = 12  # one of so many is examined in the everyday run
EVERY = [
    pytest.param(one, id=one.name, marks=[pytest.mark.slow] if one.slow or n % EVERYDAY else []) for n, one in enumerate(RIGHT)
]


@pytest.mark.parametrize("one", EVERY)
def test_nothing_is_found_of_a_right_layer(one):
    report = examine(one.subject(), **one.arguments)
    assert not report.findings, str(report)
    assert report.is_inconclusive == (one.name in INCONCLUSIVE), str(report)
    assert report.checked
