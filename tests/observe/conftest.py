"""What the tests of this room share: ways to ask for float64."""

from collections.abc import Iterator

import pytest
import torch

from default_dtype import use_default_dtype
from observe.family import Widened


@pytest.fixture
def in_float64() -> Iterator[None]:
    """Make tensors and modules in float64, where two ways to one number meet closely on every processor."""
    with use_default_dtype(torch.float64):
        yield


@pytest.fixture
def float64_models() -> Iterator[None]:
    """Let models in float64 compute all of it there, so that one token at a time is what all at once is."""
    with Widened():
        yield
