"""A torch function that ran and has followed tensors among its arguments, or makes one."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.observe.interception.handwritten.recurrences.state_loop import Trace
from regard.observe.interception.provenance import ModuleFrame

MIXES = {"lerp", "where"}


class Mixture(NamedTuple):
    """A result as the sum of two values, each times a factor that was made of one gate."""

    one: Any
    by: Any
    other: Any
    by_other: Any
    gate: Any


class FollowedFunction(NamedTuple):
    """A function that ran, by its name and its name without affixes, with the traces of its arguments by id, and its result."""

    frames: list[ModuleFrame]
    func: Any
    name: str
    core: str
    args: Any
    kwargs: Any
    traces: dict[int, Trace]
    y: Any

    @property
    def frame(self) -> ModuleFrame:
        """The module that called it."""
        return self.frames[-1]

    @property
    def is_reversed(self) -> bool:
        """Whether it is a method of its second operand, as __rsub__ is."""
        return self.name.startswith("__r")

    def find(self, x: Any) -> Trace | None:
        """Return the trace of an argument; None if it is not followed."""
        return self.traces.get(id(x))

    def read_argument(self, name: str, place: int, default: Any = None) -> Any:
        """Return the argument of a name, or at a place."""
        return self.kwargs.get(name, self.args[place] if len(self.args) > place else default)

    def read_mixture(self) -> Mixture | None:
        """Return what lerp or where mixes; None if its arguments are of another form."""
        if len(self.args) != 3 or self.kwargs:
            return None
        one, other, gate = self.args
        if self.core == "lerp":
            return Mixture(one, 1 - gate, other, gate, gate)
        is_method = isinstance(one, Tensor) and one.dtype is not torch.bool  # x.where(mask, other)
        mask, one, other = (other, one, gate) if is_method else self.args
        if not isinstance(mask, Tensor) or mask.dtype is not torch.bool:
            return None
        return Mixture(one, mask.to(self.y.dtype), other, (~mask).to(self.y.dtype), mask)
