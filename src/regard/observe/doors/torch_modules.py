"""Interception of torch's own modules: nn.MultiheadAttention with weights, and the fast path of it and the encoder layers.

These call no attention function that could be intercepted, so queries and keys are projected again from the inputs.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.mechanism.heads import split
from regard.mechanism.rule import EVERYTHING, Mask
from regard.observe.doors.lineage import apart
from regard.observe.doors.names import Names, Patch
from regard.observe.doors.passage import Crossing, Passage
from regard.observe.doors.plain import plain, unseen
from regard.observe.doors.scene import SCENE, meet, once
from regard.observe.doors.sdpa import SDPA, of_sdpa
from regard.observe.rules import Found, of_mask

FORWARD = F.multi_head_attention_forward
ENCODER_LAYER = torch._transformer_encoder_layer_fwd
NATIVE = torch._native_multi_head_attention
ARGUMENTS = inspect.signature(FORWARD)


def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> Any:
    """Replace the function of this name for torch's own modules, which look it up by name."""
    return of_sdpa(SDPA, *args, **kwargs)


def multi_head_attention_forward(*args: Any, **kwargs: Any) -> Any:
    """Replace the function of this name for torch's own modules.

    The function looks itself up by name to pass itself to other torch function modes.
    """
    return of_multi_head(FORWARD, *args, **kwargs)


def patches() -> list[Patch]:
    """Return the attribute patches for the functions that torch's own modules look up by name."""

    def encoder_layer(*args: Any) -> Any:
        return of_encoder_layer(ENCODER_LAYER, *args)

    def native(*args: Any) -> Any:
        return of_native(NATIVE, *args)

    return [
        (F, "scaled_dot_product_attention", scaled_dot_product_attention),
        (F, "multi_head_attention_forward", multi_head_attention_forward),
        (torch, "_transformer_encoder_layer_fwd", encoder_layer),
        (torch, "_native_multi_head_attention", native),
    ]


BY_NAME = Names(patches)


def of_multi_head(func: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Intercept F.multi_head_attention_forward where it returns weights.

    Otherwise it calls F.scaled_dot_product_attention, which is intercepted itself.
    """

    def run() -> Any:
        return func(query, key, value, *args, **kwargs)

    if not SCENE.live:
        return run()
    asked = ARGUMENTS.bind_partial(query, key, value, *args, **kwargs)
    asked.apply_defaults()
    given = asked.arguments
    with unseen():
        crosses = not same(query, key) and made_apart(query, key)
    if not given["need_weights"]:
        return told(run, crosses)

    def understood() -> tuple[Passage, Crossing]:
        return multi_head(run, {name: plain(x) if isinstance(x, Tensor) else x for name, x in given.items()}, crosses)

    return meet("multi_head_attention_forward", run, understood)


def multi_head(run: Callable[[], Any], given: dict[str, Any], crosses: bool) -> tuple[Passage, Crossing]:
    """Read a call that returns weights."""
    with torch.no_grad():
        q, k = projected(given)
        both = given["attn_mask"], given["key_padding_mask"]
        mask, _, bias = once(both, q, k, lambda: masks(*both, q, k), "True hides")
    return Passage("multi head", q, k, None, mask, bias=bias, crosses=crosses, caches=False), Crossing(run)


def told(run: Callable[[], Any], crosses: bool) -> Any:
    """Run the call with patched names; pass on to the kernel call inside it whether it is cross attention."""
    before, SCENE.crosses = SCENE.crosses, crosses
    try:
        with BY_NAME:
            return run()
    finally:
        SCENE.crosses = before


def same(query: Tensor, key: Tensor) -> bool:
    """Return whether two tensors are the same object, or the same memory and shape."""
    if query is key:
        return True
    try:
        return query.data_ptr() == key.data_ptr() and query.shape == key.shape
    except RuntimeError:  # a tensor without storage
        return False


def made_apart(query: Tensor, key: Tensor) -> bool:
    """Return whether the query and key that a module received were made from different tensors."""
    given = SCENE.frames[-1].given if SCENE.frames else []
    handed = [next((x for x in given if same(x, one) or same(x, one.transpose(0, 1))), one) for one in (query, key)]
    return apart(SCENE.frames, *handed) is not False


def projected(given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return q (b, h, q, d) and k (b, h, k, d) of inputs (t, b, c) or (t, c).

    The keys include those of `bias_k` and `add_zero_attn`.
    """
    query, key, heads = given["query"], given["key"], given["num_heads"]
    if query.dim() == 2:
        query, key = query.unsqueeze(1), key.unsqueeze(1)
    c, bias = query.shape[-1], given["in_proj_bias"]
    if given["use_separate_proj_weight"]:
        weights = given["q_proj_weight"], given["k_proj_weight"]
    else:
        weights = given["in_proj_weight"][:c], given["in_proj_weight"][c : 2 * c]
    biases = (None, None) if bias is None else (bias[:c], bias[c : 2 * c])
    q, k = (F.linear(x, w, b) for x, w, b in zip((query, key), weights, biases, strict=True))
    if given["bias_k"] is not None:
        k = torch.cat([k, given["bias_k"].expand(1, k.shape[1], -1).to(k.dtype)])
    q, k = (split(x.transpose(0, 1), heads) for x in (q, k))
    if given["static_k"] is not None:
        k = given["static_k"].unflatten(0, (-1, heads))
    if given["add_zero_attn"]:
        k = torch.cat([k, k.new_zeros(*k.shape[:2], 1, k.shape[3])], 2)
    return q, k


def masks(hidden: Tensor | None, padding: Tensor | None, q: Tensor, k: Tensor) -> Found:
    """Infer the rule and bias of both masks of nn.MultiheadAttention, in which True hides; added keys are visible."""
    bias: Tensor | None = None
    if hidden is not None:
        bias = additive(hidden, q).reshape(*((q.shape[0], q.shape[1]) if hidden.dim() == 3 else (1, 1)), *hidden.shape[-2:])
    if padding is not None:
        padding = additive(padding, q).reshape(q.shape[0], 1, 1, -1)
        bias = padding if bias is None else bias + padding
    if bias is None:
        return EVERYTHING, 0, None
    return of_mask(F.pad(bias, (0, k.shape[2] - bias.shape[-1])), q, k)


def additive(mask: Tensor, q: Tensor) -> Tensor:
    """Convert a mask of which True hides to one that is added to the scores; return a floating mask as it is."""
    return torch.zeros_like(mask, dtype=q.dtype).masked_fill_(mask, -torch.inf) if mask.dtype == torch.bool else mask


def of_encoder_layer(func: Callable[..., Tensor], x: Tensor, embed: int, heads: int, *rest: Any) -> Tensor:
    """Intercept torch._transformer_encoder_layer_fwd, the fast path of a whole layer."""
    weight, bias, _, _, _, norm_first, eps, norm_weight, norm_bias, *_ = rest

    def entered() -> Tensor:
        return F.layer_norm(dense(x), (embed,), norm_weight, norm_bias, eps) if norm_first else dense(x)

    result: Tensor = fast(lambda: func(x, embed, heads, *rest), x, entered, heads, (weight, bias), *rest[15:17])
    return result


def of_native(func: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor, embed: int, heads: int, *rest: Any) -> Any:
    """Intercept torch._native_multi_head_attention, the fast path of nn.MultiheadAttention."""
    weight, bias, _, _, mask, _, _, mask_type = rest
    return fast(
        lambda: func(query, key, value, embed, heads, *rest),
        query,
        lambda: dense(query),
        heads,
        (weight, bias),
        mask,
        mask_type,
    )


def fast(
    run: Callable[[], Any], x: Tensor, entered: Callable[[], Tensor], heads: int, projection: Any, mask: Any, mask_type: Any
) -> Any:
    """Intercept a call of the fast path; mask_type 0 is (q, k), 1 is padding (b, k), 2 is both, (b, h, q, k)."""
    weight, bias = projection

    def understood() -> tuple[Passage, Crossing]:
        with torch.no_grad():
            y = plain(entered())
            c = y.shape[-1]
            q, k = (split(F.linear(y, weight[part], bias[part]), heads) for part in (slice(c), slice(c, 2 * c)))
            rule: Mask = EVERYTHING
            added: Tensor | None = None
            if mask is not None:
                shape = {0: (1, 1, *mask.shape[-2:]), 1: (mask.shape[0], 1, 1, mask.shape[-1])}.get(mask_type, mask.shape)
                rule, _, added = once((mask,), q, k, lambda: of_mask(additive(mask, q).reshape(shape), q, k), "True hides")
            elif x.is_nested:
                lengths = torch.tensor([len(row) for row in x.unbind()])
                rule = of_mask((torch.arange(k.shape[2]) < lengths.view(-1, 1, 1, 1)).to(q.device), q, k)[0]
        owner = SCENE.frames[-1].module.modules()
        attention = next((m for m in owner if getattr(m, "in_proj_weight", None) is weight), None)
        return Passage("fast path", q, k, None, rule, bias=added, module=attention, crosses=False, caches=False), Crossing(run)

    return meet("fast path", run, understood)


def dense(x: Tensor) -> Tensor:
    """Return a nested tensor padded with zeros; any other as it is."""
    return x.to_padded_tensor(0.0) if x.is_nested else x
