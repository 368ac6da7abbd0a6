"""Grids from the pixels that keys were made from."""

import pytest
import torch

from regard.observe.token_places.followed_places import fit_grid


@pytest.mark.parametrize("shape", [(2, 0), (0, 4), (0, 0)])
def test_no_keys_form_no_grid(shape):
    assert fit_grid(torch.zeros(shape, dtype=torch.complex64), 2, (8, 8)) is None
