"""Modules without numbers: the shapes of a model that will get its numbers from a file, at no cost in memory or time."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

DRAWS = (nn.init.normal_, Tensor.normal_)  # on "meta" the first of them imports 800 modules of torch, a second or more


class SkipRandom(TorchFunctionMode):
    """Leaves tensors as they are where normal numbers would be drawn."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        return (args or (kwargs["tensor"],))[0] if func in DRAWS else func(*args, **kwargs)


@contextmanager
def without_numbers() -> Iterator[None]:
    """Make modules on torch's device "meta", their initial numbers not drawn."""
    with torch.device("meta"), SkipRandom():
        yield
