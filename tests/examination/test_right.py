"""Nothing is found of right layers, whatever they are made of."""

import pytest

from examination.right import RIGHT
from regard.examination import examine

EVERY = [pytest.param(one, id=one.name, marks=[pytest.mark.slow] if one.slow else []) for one in RIGHT]


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own compiler says so of torch
@pytest.mark.parametrize("one", EVERY)
def test_nothing_is_found_of_a_right_layer(one):
    report = examine(one.subject(), **one.told)
    assert report, str(report)
    assert report.checked
