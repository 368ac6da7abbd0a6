"""What the tests of this room share: ways to ask for float64."""

from collections.abc import Iterator

import pytest
import torch

from observe.family import Widened


@pytest.fixture
def in_float64() -> Iterator[None]:
    """Make tensors and modules in float64, where two ways to one number meet closely on every processor."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.fixture
def float64_models() -> Iterator[None]:
    """Let models in float64 compute all of it there, so that one token at a time is what all at once is."""
    with Widened():
        yield
