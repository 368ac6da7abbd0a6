"""Families of transformers whose attention is written out by hand are recorded as the attentions that they hand out."""

import pytest

from observe.beheld import EQUAL
from observe.eager_weights import run, same
from observe.written_out import HAND, SINGLE, UNCOMPARED, WINDOWED, compare_with_attentions

ROUNDED = 1e-5  # of a model that computes in float32, from its own weights


def each(families):
    given = [pytest.param(one, id=one.name, marks=() if one.quick else pytest.mark.slow) for one in families]
    return pytest.mark.parametrize("family", given)


@each([one for one in HAND if one.name not in WINDOWED])
def test_every_layer_is_recorded_and_the_output_is_the_same_to_the_bit(family):
    model = family.build()
    for side in family.sides:
        given = family.feed(model, side)
        plain, _ = run(model, given)
        inside, recording = run(model, given, recorded=True)
        assert same(plain, inside)
        assert recording.calls
        assert not recording.missed
        assert all("att" in name for name in recording.names)


@each([one for one in HAND if one.name not in (*WINDOWED, *UNCOMPARED)])
def test_the_maps_are_the_attentions_that_the_model_hands_out(family):
    for side in family.sides:
        maps, difference = compare_with_attentions(family, side)
        assert maps > 0
        assert difference < (ROUNDED if family.name in SINGLE else EQUAL), side


@each([one for one in HAND if one.name in WINDOWED])
def test_what_is_not_recorded_is_missed_by_the_name_of_its_module(family):
    model = family.build()
    for side in family.sides:
        _, recording = run(model, family.feed(model, side), recorded=True)
        modules = dict(model.named_modules())
        assert recording.missed
        assert all(one.module in modules and "att" in one.module for one in recording.missed)
