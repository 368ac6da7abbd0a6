"""One intercepted attention call, in regard's terms."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.map.attention_map import AttentionMap
from regard.mechanism.mask_algebra import EVERYTHING, Mask, Offset


@dataclass(eq=False, kw_only=True)
class CallArguments:
    """What an intercepted or stored call states besides its keys: queries, values, and how scores become weights."""

    q: Tensor  # (b, h, q, d)
    v: Tensor | None = None  # (b, g, k, e)
    mask: Mask = EVERYTHING  # on the call's own queries and keys
    offset: Offset = 0
    scale: float | None = None
    softcap: float | None = None
    bias: Tensor | None = None
    sinks: Tensor | None = None
    weight: Tensor | None = None  # (d,) of additive scores; None for dot products

    def build_map(self, k: Tensor, **changes: Any) -> AttentionMap:
        """Return the map of the queries and keys k (b, g, k, d), with these arguments except for `changes`."""
        given = {name: getattr(self, name) for name in MAP_ARGUMENTS}
        return AttentionMap(**given | {"k": k} | changes)


MAP_ARGUMENTS = tuple(one.name for one in fields(CallArguments) if one.name != "v")


@dataclass(frozen=True)
class RankPart:
    """The part of a call that this rank computes: the numbers of its heads among all heads, and whether all batch rows."""

    heads: tuple[int, ...]
    head_count: int
    has_whole_batch: bool


class CallPart(NamedTuple):
    """Where the queries of a call lie beside those of the calls before it in the same visit of their module."""

    packed_tokens: int = 0  # of the module's input, if the calls are consecutive parts of it; else 0
    can_be_rows: bool = True  # whether the queries may be rows behind those of the calls before
    row_range: tuple[int, int] | None = None  # from the first byte of the first to that of the last, if all are in one memory


ALONE = CallPart()


@dataclass(eq=False, kw_only=True)
class AttentionCall(CallArguments):
    """An intercepted call of an attention kernel: its arguments, and what the interception found out about its caller."""

    kernel: str
    k: Tensor  # (b, g, k, d)
    dropout: float = 0.0
    has_dropped_weights: bool = False  # whether the caller's own code has dropped some of its weights
    module: nn.Module | None = None  # the caller, if known
    is_cross: bool | None = None  # whether it is cross attention, if the kernel determines it
    has_separate_sources: bool | None = None  # whether q and k were made from different tensors, if that was observed
    can_use_cache: bool = True  # whether more keys than queries may mean that the first keys come from a cache
    is_stepwise: bool = False  # whether calls with the same keys, in one forward or many, are steps of one decoder
    unwritten_keys: int = 0  # number of further keys that the kernel was given and that no query sees
    part: CallPart = ALONE  # where its queries lie beside those of the calls before it in the same visit
    note: str = ""  # how much of it is stored as it is, and why
    unread_bias: Tensor | None = None  # numbers that the caller's mask has and this kernel, unlike others, does not add
    has_stored_weights: bool = False  # whether its scores are not known; its bias may be the logarithm of the caller's weights
    has_all_values: bool = True  # whether the values of keys that no query sees are those of the model, not 0
    rank_part: RankPart | None = None  # which part of the model's call this is, if ranks share it
    parent_rows: Tensor | None = None  # each row's parent row in the previous step, if that was observed
    follows_cache: Callable[[], bool] = bool  # whether its keys are seen to be those of a cache with the new ones behind them
    past: int = 0  # tokens before the queries of cross attention, where an intervention has counted them
    visit: int | None = None  # which visit of its module in a forward it belongs to, where an intervention has counted them

    def copy_with(self, q: Tensor, k: Tensor, v: Tensor) -> "AttentionCall":
        """Return a copy of the call with other queries, keys and values, faster than `dataclasses.replace`."""
        new = object.__new__(AttentionCall)
        vars(new).update(vars(self), q=q, k=k, v=v)
        return new


def build_plain_call(x: Tensor, v: Tensor, **known: Any) -> AttentionCall:
    """Return a call with the values v, and ones as queries and keys, of a call with weights or a context x (b, h, q, n).

    Its keys are taken for those of a cache where there are more than several queries, and where it can use one.
    """
    b, h, n, _ = x.shape
    ones = v.new_ones(1, 1, 1, 1, dtype=torch.float64)
    q, k = ones.expand(b, h, n, 1), ones.expand(b, h, v.shape[2], 1)
    return AttentionCall(q=q, k=k, v=v, has_stored_weights=True, **known)


@dataclass(eq=False)
class CallAdapter:
    """How an intercepted call runs (`run`), and how its result converts to a context and back."""

    run: Callable[[], Any]
    context: Callable[[Any], Tensor] | None = None  # result to (b, h, q, e)
    result: Callable[[Tensor, Any], Any] | None = None  # a context (b, h, q, e) and the original result to a result
    read_weights: Callable[[Any], Tensor | None] | None = None  # result to its own code's weights (b, h, q, k), dropped
    is_reversible: bool = True  # whether a result that was converted to a context and back is the same to the bit
    replace_weights: Callable[[Any, Any], Any] | None = None  # result and map to a result, if the caller asked for weights
    weights: Tensor | None = None  # (b, h, q, k), if the model's own code computed them before
    plain_call: AttentionCall | None = None  # of a call that can be changed without its scores: the values, ones as q and k
    change_weights: Callable[[Tensor, float], Tensor] | None = None  # visible keys (q, k) and a factor of scores to weights
    cut_entries: Callable[[Tensor, Tensor], Tensor] | None = None  # context and hidden entries (b, h, q, k) to a context
    hidden: Tensor | None = None  # entries that were cut so far
    run_whole: Callable[[], Any] | None = None  # how it runs without that
    context_changes: tuple[Callable[[Tensor], Tensor], ...] = ()  # of interventions, to make in reverse order
    divisor: Tensor | None = None  # the sums of the weights that the result is yet to be divided by, of the result's shape


@dataclass(frozen=True, eq=False)
class OtherWeights:
    """Normalized weights that were multiplied with something, of which no pair of tokens is known: pooling, routers, codebooks.

    The module that they ran in, and the functions that made and used them; `weights` has the layout of the model's own tensor.
    """

    kernel: str
    module: str
    weights: Tensor


@dataclass(frozen=True)
class MissedCall:
    """An attention kernel that ran and was not recorded, the module it ran in, and the reason."""

    kernel: str
    module: str
    reason: str
