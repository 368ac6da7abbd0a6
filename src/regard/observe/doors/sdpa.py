"""Interception of F.scaled_dot_product_attention, the kernel that most models call."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.mechanism.masks import Causal
from regard.mechanism.rule import EVERYTHING, Mask, Offset
from regard.observe.doors.lineage import apart
from regard.observe.doors.passage import Crossing, Passage
from regard.observe.doors.plain import plain
from regard.observe.doors.scene import SCENE, meet, read

SDPA = F.scaled_dot_product_attention


def of_sdpa(func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Intercept a call of F.scaled_dot_product_attention."""

    def run() -> Tensor:
        return func(*args, **kwargs)

    result: Tensor = meet("scaled_dot_product_attention", run, lambda: understood(run, *args, **kwargs))
    return result


def understood(
    run: Callable[[], Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Passage, Crossing]:
    """Read the call.

    Tensors have any number of batch axes and then an axis of heads, or none; is_causal is aligned to the first key.
    """
    made_apart = apart(SCENE.frames, query, key)
    query, key, value = plain(query), plain(key), plain(value)
    split = axes(query)
    q, k, v = (lifted(x, query, split) for x in (query, key, value))
    batch = torch.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    heads = q.shape[-3] if enable_gqa else torch.broadcast_shapes(q.shape[-3:-2], k.shape[-3:-2], v.shape[-3:-2])[0]
    q = q.expand(*batch, heads, -1, -1)
    if k.shape[-3] != v.shape[-3]:
        k, v = (x.expand(*batch, heads, -1, -1) for x in (k, v))
    q, k, v = (x.expand(*batch, -1, -1, -1).reshape(-1, *x.shape[-3:]) for x in (q, k, v))
    rule: tuple[Mask, Offset, Tensor | None] = (Causal() if is_causal else EVERYTHING), 0, None
    if type(attn_mask).__name__ == "CausalBias":  # torch.nn.attention.bias
        rule = Causal(), (k.shape[2] - q.shape[2] if "LOWER" in attn_mask.variant.name else 0), None
    elif attn_mask is not None:
        mask = lifted(plain(attn_mask), query, split)
        mask = mask.expand(*batch, -1, -1, -1) if len(batch) > 1 and mask.dim() > 3 else mask
        rule = read(mask.reshape(-1, *mask.shape[-3:]) if mask.dim() > 3 else mask[None], q, k)
    passage = Passage("sdpa", q, k, v, rule[0], scale, bias=rule[2], offset=rule[1], dropout=dropout_p, apart=made_apart)
    passage.crosses, passage.caches = SCENE.crosses, SCENE.crosses is None  # set by nn.MultiheadAttention, which has no cache
    four = q.shape[0], heads, q.shape[2], v.shape[3]
    return passage, Crossing(run, lambda out: plain(out).reshape(four), lambda new, out: new.reshape(out.shape))


def axes(query: Tensor) -> tuple[int, int]:
    """Return the batch size and number of heads that the first axis of a query (n, t, d) splits into; (1, -1) if unknown.

    They are inferred from an input (b, t, c) or (t, b, c) of the running modules.
    """
    if query.dim() == 3:
        n, t = query.shape[:2]
        around = (one.given for one in reversed(SCENE.frames))
        given = next((given for given in around if all(plain(x) is not query for x in given)), [])
        for x in given:
            for b, tokens in (x.shape[:2], x.shape[1::-1]) if x.dim() == 3 else ():
                if tokens == t and b and n % b == 0:
                    return b, n // b
    return 1, -1


def lifted(x: Tensor, query: Tensor, split: tuple[int, int]) -> Tensor:
    """Return x (..., h, t, d) with its axis of heads added, or split off the batch."""
    if x.dim() == 2:
        return x[None]
    return x.unflatten(0, split if len(x) == len(query) else (1, -1)) if query.dim() == x.dim() == 3 else x
