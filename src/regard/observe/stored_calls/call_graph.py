"""CallGraph: the tensors of a recorded call as they stand in the graph of the forward, for gradients from and to them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.errors import ConfigError
from regard.observe.interception.attention_call import AttentionCall
from regard.observe.recorded_runs.part_names import describe_module


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
    module: str  # the path of the module that made the call
    is_shareable: bool  # whether q, k and v are results of the forward, which nothing writes to but a model in place
    versions: tuple[int, ...]

    @classmethod
    def from_call(cls, call: AttentionCall, context: Tensor, dtype: torch.dtype, module: str) -> "CallGraph":
        """Return the graph of a call that has run in a module."""
        tensors = list_tensors(call.q, call.k, call.v)
        has_cache = call.can_use_cache and call.k.shape[2] + call.unwritten_keys != call.q.shape[2]
        is_shareable = not has_cache and all(has_origin(x) for x in tensors)
        return cls(context, call.q, call.k, call.v, dtype, module, is_shareable, tuple(x._version for x in tensors))

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Return how to copy or pickle it: as None, since a graph is of the model's forward alone."""
        self.check_unchanged()
        return type(None), ()

    def check_unchanged(self) -> None:
        """Raise ConfigError if the recording shares memory with the graph and the model has written to it."""
        if self.is_shareable and tuple(x._version for x in list_tensors(self.q, self.k, self.v)) != self.versions:
            raise ConfigError(
                f"the queries, keys or values of {describe_module(self.module)} were changed in place after its attention, and "
                "a recording that keeps values with gradients shares them with the graph: record under torch.no_grad() or "
                "without keep='values', or clone them in the model."
            )


@dataclass(frozen=True, eq=False)
class OutputGraph:
    """The tensor that a function without a softmax returned, with its graph, and where its outputs (b, h, q, e) are in it.

    gates (b, h, q, e) are what the function multiplied M v by, or None; version is that which torch counts.
    """

    result: Tensor
    shape: torch.Size
    strides: tuple[int, ...]
    first: int  # the number of the first output in the memory of the result
    gates: Tensor | None
    version: int

    @classmethod
    def from_result(cls, result: Tensor | None, outputs: Tensor, gates: Tensor | None) -> "OutputGraph | None":
        """Return the graph of a call that has run; None if it ran without gradients or its outputs are not its result's."""
        if result is None or not result.requires_grad:
            return None
        if outputs.untyped_storage().data_ptr() != result.untyped_storage().data_ptr() or outputs.dtype != result.dtype:
            return None
        first = int(outputs.storage_offset()) - int(result.storage_offset())
        return cls(result, outputs.shape, outputs.stride(), first, None if gates is None else gates.detach(), result._version)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Return how to copy or pickle it: as None, since a graph is of the model's forward alone."""
        return type(None), ()

    @property
    def is_unchanged(self) -> bool:
        """Return whether the model has not written to the result since."""
        return self.result._version == self.version

    def arrange(self, gradient: Tensor) -> Tensor:
        """Return the gradient with respect to M v, (b, h, q, e), given that with respect to the result."""
        copied = torch.empty_strided(self.result.shape, self.result.stride(), dtype=gradient.dtype, device=gradient.device)
        found = copied.copy_(gradient).as_strided(self.shape, self.strides, self.first)
        return found if self.gates is None else found * self.gates


def list_tensors(*tensors: Tensor | None) -> list[Tensor]:
    """Return those that are tensors."""
    return [x for x in tensors if x is not None]


def has_origin(x: Tensor) -> bool:
    """Return whether a tensor, or what it is a view of, was computed by a forward with gradients: no parameter, no input."""
    root = x if x._base is None else x._base
    return root.grad_fn is not None
