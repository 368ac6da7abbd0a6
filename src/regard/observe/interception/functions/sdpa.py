"""Interception of F.scaled_dot_product_attention, the kernel that most models call."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.mechanism.mask_algebra import EVERYTHING, Mask, Offset
from regard.mechanism.masks import Causal
from regard.observe.interception.attention_call import AttentionCall, CallAdapter
from regard.observe.interception.call_dispatch import dispatch_call
from regard.observe.interception.forward_cache import infer_mask_rule
from regard.observe.interception.functions.cached_keys import follows_cached_keys
from regard.observe.interception.functions.distributed_tensors import make_part_adapter, take_local_heads
from regard.observe.interception.functions.head_layout import HeadLayout, find_head_layout
from regard.observe.interception.functions.nested_tensors import read_nested_call
from regard.observe.interception.plain_tensors import is_distributed, unwrap_tensor
from regard.observe.interception.provenance import has_separate_sources
from regard.observe.interception.thread_state import STATE

SDPA = F.scaled_dot_product_attention


def intercept_sdpa(func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Intercept a call of F.scaled_dot_product_attention."""

    def run() -> Tensor:
        return func(*args, **kwargs)

    result: Tensor = dispatch_call("scaled_dot_product_attention", run, lambda: read_call(run, *args, **kwargs))
    return result


def read_call(
    run: Callable[[], Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[AttentionCall, CallAdapter]:
    """Read the call.

    Tensors have any number of batch axes and an axis of heads, or none; is_causal is aligned to the first key.
    """
    are_separate = has_separate_sources(STATE.frames, query, key)
    if any(isinstance(x, Tensor) and x.is_nested for x in (query, key, value)):
        return read_nested_call(
            run,
            (query, key, value),
            is_masked=attn_mask is not None,
            is_causal=is_causal,
            scale=scale,
            has_separate_sources=are_separate,
        )
    follows_cache: Callable[[], bool] = partial(follows_cached_keys, STATE.frames[-1], query, key) if STATE.frames else bool
    has_ranks, note, part, whole = any(map(is_distributed, (query, key, value))), "", None, query
    if has_ranks:
        query, key, value, attn_mask, part, note = take_local_heads(query, key, value, attn_mask)
    query, key, value = unwrap_tensor(query), unwrap_tensor(key), unwrap_tensor(value)
    layout = find_head_layout(query, key, value, is_distributed=has_ranks)
    expanded = expand_heads(*map(layout.arrange, (query, key, value)), is_grouped=enable_gqa)
    q, k, v = (x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:]) for x in expanded)
    if STATE.mode is not None and STATE.mode.positions.stored:
        for x, y in zip(expanded, (q, k, v), strict=True):
            STATE.mode.follow_positions(STATE.mode.positions.follow_copy, x, y)
    batch = expanded[0].shape[:-3]
    mask, offset, bias = read_mask(attn_mask, q, k, layout, batch) if attn_mask is not None else (None, 0, None)
    call = AttentionCall(
        kernel="sdpa",
        q=q,
        k=k,
        v=v,
        mask=mask if mask is not None else Causal() if is_causal else EVERYTHING,
        scale=scale,
        bias=bias,
        offset=offset,
        dropout=dropout_p,
        has_separate_sources=are_separate,
        is_cross=STATE.is_cross,
        can_use_cache=STATE.is_cross is None,  # nn.MultiheadAttention, which sets it, has no cache
        note=note,
        rank_part=part,
        follows_cache=follows_cache,
    )
    if has_ranks:
        return call, make_part_adapter(call, whole, run)
    return call, layout.make_adapter(run, (*batch, *q.shape[1:3], v.shape[3]))


def expand_heads(q: Tensor, k: Tensor, v: Tensor, *, is_grouped: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values (..., h, t, d) with all axes before the heads that torch broadcasts.

    Keys and values keep fewer heads than the queries where both have as many; heads are broadcast if they are not grouped.
    """
    batch = torch.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    heads = q.shape[-3] if is_grouped else torch.broadcast_shapes(q.shape[-3:-2], k.shape[-3:-2], v.shape[-3:-2])[0]
    q = q.expand(*batch, heads, -1, -1)
    if k.shape[-3] != v.shape[-3]:
        k, v = (x.expand(*batch, heads, -1, -1) for x in (k, v))
    return q, k.expand(*batch, -1, -1, -1), v.expand(*batch, -1, -1, -1)


def read_mask(mask: Any, q: Tensor, k: Tensor, layout: HeadLayout, batch: Sequence[int]) -> tuple[Mask, Offset, Tensor | None]:
    """Return the rule, offset and bias of an argument attn_mask of queries and keys (b, h, t, d), whose batch had some axes."""
    if type(mask).__name__ == "CausalBias":  # torch.nn.attention.bias
        return Causal(), (k.shape[2] - q.shape[2] if "LOWER" in mask.variant.name else 0), None
    mask = layout.arrange(unwrap_tensor(mask))
    mask = mask.expand(*batch, -1, -1, -1) if len(batch) > 1 and mask.dim() > 3 else mask
    return infer_mask_rule(mask.reshape(-1, *mask.shape[-3:]) if mask.dim() > 3 else mask[None], q, k)
