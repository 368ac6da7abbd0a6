"""One intercepted call of a recurrence: attention without a softmax, in regard's terms."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from regard.map.implicit_map import Mechanism


@dataclass(frozen=True, eq=False)
class RecurrenceFactors:
    """What a call computed: its matrix as factors, values and outputs (b, h, t, e), and the state that it left.

    state is (b, n), all of it or a fixed sample; None if the call left none. gates (b, h, t, e) are what the function
    multiplied M v by, if it did so in each channel of a head.
    """

    mechanism: Mechanism
    values: Tensor
    outputs: Tensor
    state: Tensor | None
    gates: Tensor | None = None


@dataclass(frozen=True, eq=False)
class RecurrenceCall:
    """A call of a recurrence: the function that ran, the state that it started from, and how its factors are read.

    initial_state is (b, n), as that of RecurrenceFactors; None if it started from nothing.
    """

    kernel: str
    initial_state: Tensor | None
    read: Callable[[], RecurrenceFactors]
