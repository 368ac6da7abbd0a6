"""Families of models as cases of a test."""

import pytest

from observe.family import Family


def parametrize_families(families: list[Family]) -> pytest.MarkDecorator:
    """A test of each family, of which some are in the everyday run."""
    given = [pytest.param(one, id=one.name, marks=() if one.quick else pytest.mark.slow) for one in families]
    return pytest.mark.parametrize("family", given)
