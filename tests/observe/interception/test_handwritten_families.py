"""Families of transformers whose attention is written out by hand are recorded as the attentions that they hand out."""

import pytest
import torch

from observe.beheld import EQUAL
from observe.eager_weights import handed_out, mapped, run, same
from observe.family import Widened
from observe.written_out import HAND

WINDOWED = ["longformer", "led"]  # overlapping blocks, whose keys are not followed
HANDS_OUT_SCORES = ["squeezebert"]
STREAMS = ["prophetnet"]  # a decoder layer attends twice, once for each stream
SINGLE = ["xglm"]  # computes in float32 only
HANDS_OUT_NOTHING = ["gptj", "codegen"]
IN_ORDER = ["funnel"]  # hands out those of its encoder and its decoder as one
TOWERS = {"git": "encoder.layer"}  # beside an encoder of images, which is recorded through the registry


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


@each([one for one in HAND if one.name not in (*WINDOWED, *HANDS_OUT_SCORES, *STREAMS, *HANDS_OUT_NOTHING)])
def test_the_maps_are_the_attentions_that_the_model_hands_out(family):
    single = family.name in SINGLE
    model = family.build(torch.float32 if single else torch.float64)
    for side in family.sides:
        given = family.feed(model, side)
        with Widened() if not single else torch.no_grad():
            _, recording = run(model, given, recorded=True)
            output, _ = run(model, given, output_attentions=True)
        weights = handed_out(output)
        assert weights
        for key, expected in weights.items():
            if family.name in IN_ORDER:
                found = recording.calls[key[2]].map
            elif family.name in TOWERS:
                found = recording.map(f"{TOWERS[family.name]}.{key[2]}.attention.self")
            else:
                found = mapped(recording, key)
            assert found.shape == expected.shape
            assert (found.dense() - expected).abs().max() < (1e-5 if single else EQUAL), (side, key)


@each([one for one in HAND if one.name in WINDOWED])
def test_what_is_not_recorded_is_missed_by_the_name_of_its_module(family):
    model = family.build()
    for side in family.sides:
        _, recording = run(model, family.feed(model, side), recorded=True)
        modules = dict(model.named_modules())
        assert recording.missed
        assert all(one.module in modules and "att" in one.module for one in recording.missed)
