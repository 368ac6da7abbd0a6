"""Every wrong layer is found, and its mistake is named first."""

import pytest

from examination.wrong import WRONG
from regard.examination import examine

EVERYDAY = {one.kinds: one.name for one in reversed(WRONG)}.values()  # the first of each kind
EVERY = [pytest.param(one, id=one.name, marks=[] if one.name in EVERYDAY else [pytest.mark.slow]) for one in WRONG]


@pytest.mark.parametrize("one", EVERY)
def test_a_wrong_layer_is_named(one):
    report = examine(one.subject(), **one.settings())
    assert not report
    assert report.findings[0].kind in one.kinds, str(report)


def test_there_are_at_least_forty_mistakes():
    assert len({one.name for one in WRONG}) >= 40
