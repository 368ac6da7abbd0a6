"""torch's default dtype, of tensors and modules that are made without one."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def use_default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make tensors and modules in a dtype inside."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
