"""CallGraph: the tensors of a recorded call as they stand in the graph of the forward, for gradients from and to them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.errors import ConfigError
from regard.observe.interception.attention_call import AttentionCall


@dataclass(frozen=True, eq=False)
class CallGraph:
    """The context (b, h, q, e) of all heads, and q, k and v of the call, with their graph.

    A recording shares the memory of q, k and v with the graph where it can, since the backward needs them as well; versions
    are those that torch counts, so that a later change in place is noticed.
    """

    context: Tensor
    q: Tensor
    k: Tensor
    v: Tensor | None
    dtype: torch.dtype  # in which the kernel saw them, under autocast
    is_shareable: bool  # whether q, k and v are results of the forward, which nothing writes to but a model in place
    versions: tuple[int, ...]

    @classmethod
    def from_call(cls, call: AttentionCall, context: Tensor, dtype: torch.dtype) -> "CallGraph":
        """Return the graph of a call that has run."""
        tensors = list_tensors(call.q, call.k, call.v)
        has_cache = call.can_use_cache and call.k.shape[2] + call.unwritten_keys != call.q.shape[2]
        is_shareable = not has_cache and all(has_origin(x) for x in tensors)
        return cls(context, call.q, call.k, call.v, dtype, is_shareable, tuple(x._version for x in tensors))

    def check_unchanged(self, name: str) -> None:
        """Raise ConfigError if the recording shares memory with the graph and the model has written to it."""
        if self.is_shareable and tuple(x._version for x in list_tensors(self.q, self.k, self.v)) != self.versions:
            raise ConfigError(
                f"the queries, keys or values of {name} were changed in place after its attention, and a recording that keeps "
                "values with gradients shares them with the graph: record under torch.no_grad() or without keep='values', or "
                "clone them in the model."
            )


def list_tensors(*tensors: Tensor | None) -> list[Tensor]:
    """Return those that are tensors."""
    return [x for x in tensors if x is not None]


def has_origin(x: Tensor) -> bool:
    """Return whether a tensor, or what it is a view of, was computed by a forward with gradients: no parameter, no input."""
    root = x if x._base is None else x._base
    return root.grad_fn is not None
