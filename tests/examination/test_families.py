"""Nothing but a window is found in the attention calls of transformers' model families, and most state their scale."""

import pytest

from observe.families import DECODERS, FAMILIES
from regard import Causal, Everything
from regard.examination import examine

EVERYDAY = 12  # one of so many is examined in the everyday run
EVERY = [pytest.param(one, id=one.name, marks=[pytest.mark.slow] if n % EVERYDAY else []) for n, one in enumerate(FAMILIES)]


@pytest.mark.slow
@pytest.mark.parametrize("family", EVERY)
def test_no_call_of_a_public_model_is_accused(family):
    model = family.build()
    rule = Causal() if family in DECODERS else Everything()
    report = examine(model, expects=rule, sample=family.feed(model))
    assert [one for one in report.findings if one.cause != "mask"] == []  # windows, and decoders beside encoders
    assert report.notes
    assert "attention layers examined in the calls that they get" in report.notes[0]
