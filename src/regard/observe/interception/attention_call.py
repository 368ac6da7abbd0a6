"""One intercepted attention call, in regard's terms."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from regard.observe.score_arguments import ScoreArguments


@dataclass(eq=False)
class AttentionCall(ScoreArguments):
    """The arguments of an attention kernel: q (b, h, q, d), k (b, g, k, d), v (b, g, k, e), and how they are scored."""

    kernel: str
    q: Tensor
    k: Tensor
    v: Tensor | None = None
    dropout: float = 0.0
    module: nn.Module | None = None  # the caller, if known
    is_cross: bool | None = None  # whether it is cross attention, if the kernel determines it
    has_separate_sources: bool | None = None  # whether q and k were made from different tensors, if that was observed
    can_use_cache: bool = True  # whether more keys than queries may mean that the first keys come from a cache
    is_stepwise: bool = False  # whether calls with the same keys, in one forward or many, are steps of one decoder
    unwritten_keys: int = 0  # number of further keys that the kernel was given and that no query sees
    note: str = ""  # how much of it is stored as it is, and why
    parent_rows: Tensor | None = None  # each row's parent row in the previous step, if that was observed


@dataclass(eq=False)
class CallAdapter:
    """How an intercepted call runs (`run`), and how its result converts to a context and back."""

    run: Callable[[], Any]
    context: Callable[[Any], Tensor] | None = None  # result to (b, h, q, e)
    result: Callable[[Tensor, Any], Any] | None = None  # a context (b, h, q, e) and the original result to a result
    read_weights: Callable[[Any], Tensor | None] | None = (
        None  # result to the weights (b, h, q, k) that the caller's code computed
    )
    replace_weights: Callable[[Any, Any], Any] | None = None  # result and map to a result, if the caller asked for weights


@dataclass(frozen=True)
class MissedCall:
    """An attention kernel that ran and was not recorded, the module it ran in, and the reason."""

    kernel: str
    module: str
    reason: str
