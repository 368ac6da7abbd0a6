"""Every wrong layer is found, and its mistake is named first."""

import pytest

from examination.wrong import WRONG
from regard.examination import examine

# these need probes that train, drop, overflow or round, which are not built yet: strict, so that each leaves with its probe
WAITING = {"ExpOverflows", "exp_overflows", "MaskTooSmall", "HalfInside", "HalfSums", "DropsAlways", "KernelDropsAlways"}
WAITING |= {"NotRescaled", "RescaledByDropped", "RescaledInEvaluation", "ScoresDropped", "Detached", "WithoutGradient"}
WAITING |= {"WeightData", "HeadsInAList", "OutputUnused"}
WAITS = pytest.mark.xfail(strict=True, reason="the probe that finds it is not built yet")
EVERY = [pytest.param(one, id=one.name, marks=[WAITS] if one.name in WAITING else []) for one in WRONG]


@pytest.mark.parametrize("one", EVERY)
def test_a_wrong_layer_is_named(one):
    report = examine(one.subject(), **one.settings())
    assert not report
    assert report.findings[0].kind in one.kinds, str(report)


def test_there_are_at_least_forty_mistakes():
    assert len({one.name for one in WRONG}) >= 40
