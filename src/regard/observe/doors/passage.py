"""One call of attention on its way through a door, in the terms of the house."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from regard.mechanism.rule import EVERYTHING, Mask, Offset


@dataclass(eq=False)
class Passage:
    """What a kernel is handed: q (b, h, q, d), k (b, g, k, d), v (b, g, k, e), the rule and what else enters the scores."""

    door: str
    q: Tensor
    k: Tensor
    v: Tensor | None = None
    mask: Mask = EVERYTHING
    scale: float | None = None
    softcap: float | None = None
    bias: Tensor | None = None
    sinks: Tensor | None = None
    offset: Offset = 0
    dropout: float = 0.0
    module: nn.Module | None = None  # that made the call, where the door knows it
    crosses: bool | None = None  # whether keys come from elsewhere than queries, where the door knows it
    apart: bool | None = None  # whether they were made from different tensors, where that was seen
    weight: Tensor | None = None  # of additive scores; None where they are dot products
    caches: bool = True  # whether more keys than queries may mean that the first of them are from earlier steps
    stepwise: bool = False  # whether calls of the same keys, in one forward or in many, are steps of one decoder
    room: int = 0  # keys behind these that the kernel was handed and that no query sees
    turned: Tensor | None = None  # the row of the step before that each row continues, where that was seen


@dataclass(eq=False)
class Crossing:
    """How a door lets a call pass: `run` is the call as it was made, the other two move between its result and a context."""

    run: Callable[[], Any]
    context: Callable[[Any], Tensor] | None = None  # result to (b, h, q, e)
    result: Callable[[Tensor, Any], Any] | None = None  # a context (b, h, q, e) and the former result to a result
    told: Callable[[Any], Tensor | None] | None = None  # result to the weights (b, h, q, k) that the caller's own code computed
    answer: Callable[[Any, Any], Any] | None = None  # result and map to a result, where the caller asked for weights


@dataclass(frozen=True)
class Missed:
    """A kernel that ran and was not recorded, the module it ran in, and why."""

    kernel: str
    module: str
    reason: str
