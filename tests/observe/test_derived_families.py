"""Families of transformers with derived configs are recorded as the softmaxes that they compute."""

import pytest

from observe.derived_families import DERIVED, compare_derived

ROUNDED = 1e-5  # in float32
QUICK = ("Inkling2TextModel", "MllamaModel", "GlmMoeDsaModel")  # in the everyday run


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in DERIVED])
def test_the_maps_are_the_softmaxes_of_the_model(name):
    maps, difference = compare_derived(name)
    assert maps > 0
    assert difference < ROUNDED
