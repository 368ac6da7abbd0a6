"""Create modules without initial values, at no cost in memory or time: the values will come from a file."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

DRAWS = (nn.init.normal_, Tensor.normal_)  # on "meta" the first one imports 800 modules of torch, which takes a second or more


class SkipNormalInit(TorchFunctionMode):
    """Skip the normal initialization of tensors."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        return (args or (kwargs["tensor"],))[0] if func in DRAWS else func(*args, **kwargs)


@contextmanager
def create_on_meta() -> Iterator[None]:
    """Create modules on torch's "meta" device within the context, without drawing initial values."""
    with torch.device("meta"), SkipNormalInit():
        yield
