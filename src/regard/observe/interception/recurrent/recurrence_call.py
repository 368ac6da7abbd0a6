"""One intercepted call of attention without a softmax, in regard's terms: a recurrence, or weights that are no softmax.

A later call is known to continue a recurrence by a sample of the state that it left.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from regard.map.implicit_map import Mechanism
from regard.observe.interception.attention_call import AttentionCall

Given = dict[str, Any]  # the arguments of a call by name
STATE_NUMBERS = 4096  # numbers of each row's state that are compared between calls


@dataclass(frozen=True, eq=False)
class RecurrenceFactors:
    """What a call computed: its matrix as factors, values (b, h, k, e) and outputs (b, h, q, e), and the state that it left.

    state is (b, n), all of it or a fixed sample; None if the call left none. gates (b, h, q, e) are what the function
    multiplied M v by, if it did so in each channel of a head. note says how much of it is stored as it is, and why.
    """

    mechanism: Mechanism
    values: Tensor
    outputs: Tensor
    state: Tensor | None
    gates: Tensor | None = None
    note: str = ""

    def copy_mechanism(self) -> Mechanism:
        """Return the matrix with copies of its tensors."""
        tensors: dict[str, Any] = {name: x.clone() for name, x in self.mechanism.tensors.items()}
        return replace(self.mechanism, **tensors)

    def select_new_values(self) -> "RecurrenceFactors":
        """Return the same with the values of the last tokens alone, as many as there are queries: the others are known."""
        return replace(self, values=self.values[:, :, -self.outputs.shape[2] :])


@dataclass(frozen=True, eq=False)
class RecurrenceCall:
    """A call without a softmax: the function that ran, the state that it started from, and how its factors are read.

    initial_state is (b, n), as that of RecurrenceFactors; None if it started from nothing. must_continue says that the call
    is no map of its own if no recorded call has left that state. read_softmaxes returns the softmaxes whose heads were mixed to
    the weights, none if these are not known; it may be called until the forward ends. result is the tensor
    that the model goes on with, with its graph.
    """

    kernel: str
    initial_state: Tensor | None
    read: Callable[[], RecurrenceFactors]
    must_continue: bool = True
    read_softmaxes: Callable[[], list[AttentionCall]] = list
    result: Tensor | None = None


def build_read_call(kernel: str, factors: RecurrenceFactors) -> RecurrenceCall:
    """Return a call whose factors are read already, and which is a map of its own."""
    return RecurrenceCall(kernel, None, lambda: factors, must_continue=False)


def sample_state(*parts: Tensor | None) -> Tensor | None:
    """Return some numbers (b, n) of a state, copied; None if there is none, or if it is 0, as before the first token.

    They have a gradient if the state has one.
    """
    given = [x for x in parts if x is not None]
    return copy_sample(*given) if len(given) == len(parts) and bool(given[0].any()) else None


def copy_sample(*parts: Tensor) -> Tensor:
    """Return a copy of some numbers (b, n) of a state."""
    whole = [x.flatten(1) for x in parts]
    whole = [x[:, :: max(1, -(-x.shape[1] // STATE_NUMBERS))] for x in whole]
    return torch.cat([x.to(whole[0].dtype) for x in whole], 1).clone()
