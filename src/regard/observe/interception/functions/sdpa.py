"""Interception of F.scaled_dot_product_attention, the kernel that most models call."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.mechanism.mask_algebra import EVERYTHING, Mask, Offset
from regard.mechanism.masks import Causal
from regard.observe.interception.attention_call import AttentionCall, CallAdapter
from regard.observe.interception.call_dispatch import dispatch_call
from regard.observe.interception.folded_heads import FoldedHeads, find_folded_heads
from regard.observe.interception.forward_cache import infer_mask_rule
from regard.observe.interception.functions.cached_keys import follows_cached_keys
from regard.observe.interception.functions.distributed_tensors import make_part_adapter, take_local_heads
from regard.observe.interception.functions.nested_tensors import read_nested_call
from regard.observe.interception.head_counts import find_head_counts
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
    folded, is_folded = None if has_ranks else find_heads(query, value), query.dim() == 3
    if folded is not None and is_folded:
        query, key, value = (unfold_heads(x, folded) for x in (query, key, value))
        attn_mask = unfold_heads(unwrap_tensor(attn_mask), folded) if isinstance(attn_mask, Tensor) else attn_mask
    if folded is not None:
        axis = -4 if folded.is_before and not is_folded else -3
    else:
        axis = -3 if has_ranks else find_heads_axis(query, key, value)
    query, key, value = (x.movedim(axis, -3) for x in (query, key, value)) if axis != -3 else (query, key, value)
    batch_and_heads = infer_batch_and_heads(query)
    q, k, v = (add_head_axis(x, query, batch_and_heads) for x in (query, key, value))
    batch = torch.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    heads = q.shape[-3] if enable_gqa else torch.broadcast_shapes(q.shape[-3:-2], k.shape[-3:-2], v.shape[-3:-2])[0]
    q = q.expand(*batch, heads, -1, -1)
    if k.shape[-3] != v.shape[-3]:
        k, v = (x.expand(*batch, heads, -1, -1) for x in (k, v))
    q, k, v = (x.expand(*batch, -1, -1, -1) for x in (q, k, v))
    expanded = q, k, v
    q, k, v = (x.reshape(batch.numel(), *x.shape[-3:]) for x in expanded)
    if STATE.mode is not None and STATE.mode.positions.stored:
        for x, y in zip(expanded, (q, k, v), strict=True):
            STATE.mode.follow_positions(STATE.mode.positions.follow_copy, x, y)
    rule: tuple[Mask, Offset, Tensor | None] = (Causal() if is_causal else EVERYTHING), 0, None
    if type(attn_mask).__name__ == "CausalBias":  # torch.nn.attention.bias
        rule = Causal(), (k.shape[2] - q.shape[2] if "LOWER" in attn_mask.variant.name else 0), None
    elif attn_mask is not None:
        mask = unwrap_tensor(attn_mask)
        mask = mask if axis == -3 else mask[(None,) * (query.dim() - mask.dim())].movedim(axis, -3)
        mask = add_head_axis(mask, query, batch_and_heads)
        mask = mask.expand(*batch, -1, -1, -1) if len(batch) > 1 and mask.dim() > 3 else mask
        rule = infer_mask_rule(mask.reshape(-1, *mask.shape[-3:]) if mask.dim() > 3 else mask[None], q, k)
    call = AttentionCall(
        kernel="sdpa",
        q=q,
        k=k,
        v=v,
        mask=rule[0],
        scale=scale,
        bias=rule[2],
        offset=rule[1],
        dropout=dropout_p,
        has_separate_sources=are_separate,
        is_cross=STATE.is_cross,
        can_use_cache=STATE.is_cross is None,  # nn.MultiheadAttention, which sets it, has no cache
        note=note,
        rank_part=part,
        follows_cache=follows_cache,
    )
    four, more = (q.shape[0], heads, q.shape[2], v.shape[3]), (*batch, heads, q.shape[2], v.shape[3])
    if has_ranks:
        return call, make_part_adapter(call, whole, run)
    if axis != -3:
        return call, CallAdapter(
            run,
            lambda out: unwrap_tensor(out).movedim(axis, -3).reshape(four),
            lambda new, out: new.reshape(more).movedim(-3, axis),
        )
    if folded is not None and folded.is_before and is_folded:
        return call, CallAdapter(
            run, lambda out: unfold_heads(unwrap_tensor(out), folded), lambda new, out: new.transpose(0, 1).reshape(out.shape)
        )
    return call, CallAdapter(run, lambda out: unwrap_tensor(out).reshape(four), lambda new, out: new.reshape(out.shape))


def find_heads(query: Tensor, value: Tensor) -> FoldedHeads | None:
    """Return the heads of a call of three or four axes, as what made its values shows them; None if that is not needed."""
    if query.dim() == value.dim() == 3:
        return find_folded_heads(STATE.frames, value)
    stated = find_head_counts(least=1)[:1]
    if not query.dim() == value.dim() == 4 or (stated == [query.shape[1]] and query.shape[0] != query.shape[1]):
        return None
    return find_folded_heads(STATE.frames, value, (0, 1))


def unfold_heads(x: Tensor, folded: FoldedHeads) -> Tensor:
    """Return a tensor (n, t, e) as (b, h, t, e), one that all rows share as (1, 1, t, e); any other as it is."""
    if x.dim() != 3 or len(x) == 1:
        return x[None] if x.dim() == 3 else x
    found: Tensor = x.unflatten(0, (folded.heads, -1) if folded.is_before else (-1, folded.heads))
    return found.transpose(0, 1) if folded.is_before else found


def find_heads_axis(query: Tensor, key: Tensor, value: Tensor) -> int:
    """Return the axis of heads of tensors (b, ..., t, d) with several axes before t: -3, or the one whose size modules state.

    Windows stand behind the heads in Hiera and NesT of timm, for one.
    """
    axes = range(1 - query.dim(), -2)
    if not len(axes) > 1 or not query.dim() == key.dim() == value.dim():
        return -3
    for count in dict.fromkeys(find_head_counts(least=1)):
        fits = [axis for axis in axes if query.shape[axis] == count]
        if fits:
            return fits[0] if len(fits) == 1 else -3
    return -3


def infer_batch_and_heads(query: Tensor) -> tuple[int, int]:
    """Return the batch size and number of heads that the first axis of a query (n, t, d) splits into; (1, -1) if unknown.

    They are inferred from an input (b, t, c), (t, b, c), or (b, rows, columns, c) with rows * columns tokens, of the running
    modules.
    """
    if query.dim() == 3:
        n, t = query.shape[:2]
        inputs = (one.input_tensors for one in reversed(STATE.frames))
        tensors = next((tensors for tensors in inputs if all(unwrap_tensor(x) is not query for x in tensors)), [])
        for x in sorted(tensors, key=Tensor.dim):  # (b, t, c) before a mask (1, 1, q, k)
            pairs = (x.shape[:2], x.shape[1::-1]) if x.dim() == 3 else ((x.shape[0], x.shape[1:-1].numel()),) * (x.dim() == 4)
            for b, tokens in pairs:
                if tokens == t and b and n % b == 0:
                    return b, n // b
    return 1, -1


def add_head_axis(x: Tensor, query: Tensor, batch_and_heads: tuple[int, int]) -> Tensor:
    """Return x (..., h, t, d) with its axis of heads added, or split off the batch."""
    if x.dim() == 2:
        return x[None]
    return x.unflatten(0, batch_and_heads if len(x) == len(query) else (1, -1)) if query.dim() == x.dim() == 3 else x
