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
from regard.mechanism.mask_algebra import EVERYTHING, Mask
from regard.observe.interception.attention_call import AttentionCall, CallAdapter
from regard.observe.interception.call_dispatch import dispatch_call
from regard.observe.interception.forward_cache import infer_once
from regard.observe.interception.functions.sdpa import SDPA, intercept_sdpa
from regard.observe.interception.patching import AttributePatch, PatchSet
from regard.observe.interception.plain_tensors import disable_modes, unwrap_tensor
from regard.observe.interception.provenance import has_separate_sources
from regard.observe.interception.thread_state import STATE
from regard.observe.stored_calls.mask_inference import InferredRule, infer_rule

FORWARD = F.multi_head_attention_forward
ENCODER_LAYER = torch._transformer_encoder_layer_fwd
NATIVE = torch._native_multi_head_attention
ARGUMENTS = inspect.signature(FORWARD)


def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> Any:
    """Replace the function of this name for torch's own modules, which look it up by name."""
    return intercept_sdpa(SDPA, *args, **kwargs)


def multi_head_attention_forward(*args: Any, **kwargs: Any) -> Any:
    """Replace the function of this name for torch's own modules.

    The function looks itself up by name to pass itself to other torch function modes.
    """
    return intercept_multi_head(FORWARD, *args, **kwargs)


def build_patches() -> list[AttributePatch]:
    """Return the attribute patches for the functions that torch's own modules look up by name."""

    def call_encoder_layer(*args: Any) -> Any:
        return intercept_encoder_layer(ENCODER_LAYER, *args)

    def call_native(*args: Any) -> Any:
        return intercept_native(NATIVE, *args)

    return [
        (F, "scaled_dot_product_attention", scaled_dot_product_attention),
        (F, "multi_head_attention_forward", multi_head_attention_forward),
        (torch, "_transformer_encoder_layer_fwd", call_encoder_layer),
        (torch, "_native_multi_head_attention", call_native),
    ]


TORCH_PATCHES = PatchSet(build_patches)


def intercept_multi_head(func: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Intercept F.multi_head_attention_forward where it returns weights.

    Otherwise it calls F.scaled_dot_product_attention, which is intercepted itself.
    """

    def run() -> Any:
        return func(query, key, value, *args, **kwargs)

    if not STATE.is_active:
        return run()
    asked = ARGUMENTS.bind_partial(query, key, value, *args, **kwargs)
    asked.apply_defaults()
    given = asked.arguments
    with disable_modes():
        crosses = not is_same_tensor(query, key) and has_separate_inputs(query, key)
    if not given["need_weights"]:
        return call_with_patches(run, crosses)

    def read_call() -> tuple[AttentionCall, CallAdapter]:
        return read_multi_head(
            run, {name: unwrap_tensor(x) if isinstance(x, Tensor) else x for name, x in given.items()}, crosses
        )

    return dispatch_call("multi_head_attention_forward", run, read_call)


def read_multi_head(run: Callable[[], Any], arguments: dict[str, Any], crosses: bool) -> tuple[AttentionCall, CallAdapter]:
    """Read a call that returns weights."""
    with torch.no_grad():
        q, k = project_queries_and_keys(arguments)
        both = arguments["attn_mask"], arguments["key_padding_mask"]
        mask, _, bias = infer_once(both, q, k, lambda: infer_masks(*both, q, k), "True hides")
    call = AttentionCall(kernel="multi head", q=q, k=k, mask=mask, bias=bias, is_cross=crosses, can_use_cache=False)
    return call, CallAdapter(run)


def call_with_patches(run: Callable[[], Any], crosses: bool) -> Any:
    """Run the call with patched names; pass on to the kernel call inside it whether it is cross attention."""
    before, STATE.is_cross = STATE.is_cross, crosses
    try:
        with TORCH_PATCHES:
            return run()
    finally:
        STATE.is_cross = before


def is_same_tensor(query: Tensor, key: Tensor) -> bool:
    """Return whether two tensors are the same object, or the same memory and shape."""
    if query is key:
        return True
    try:
        return query.data_ptr() == key.data_ptr() and query.shape == key.shape
    except RuntimeError:  # a tensor without storage
        return False


def has_separate_inputs(query: Tensor, key: Tensor) -> bool:
    """Return whether the query and key that a module received were made from different tensors."""
    given = STATE.frames[-1].given_tensors if STATE.frames else []
    handed = [
        next((x for x in given if is_same_tensor(x, one) or is_same_tensor(x, one.transpose(0, 1))), one)
        for one in (query, key)
    ]
    return has_separate_sources(STATE.frames, *handed) is not False


def project_queries_and_keys(arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return q (b, h, q, d) and k (b, h, k, d) of inputs (t, b, c) or (t, c).

    The keys include those of `bias_k` and `add_zero_attn`.
    """
    query, key, heads = arguments["query"], arguments["key"], arguments["num_heads"]
    if query.dim() == 2:
        query, key = query.unsqueeze(1), key.unsqueeze(1)
    c, bias = query.shape[-1], arguments["in_proj_bias"]
    if arguments["use_separate_proj_weight"]:
        weights = arguments["q_proj_weight"], arguments["k_proj_weight"]
    else:
        weights = arguments["in_proj_weight"][:c], arguments["in_proj_weight"][c : 2 * c]
    biases = (None, None) if bias is None else (bias[:c], bias[c : 2 * c])
    q, k = (F.linear(x, w, b) for x, w, b in zip((query, key), weights, biases, strict=True))
    if arguments["bias_k"] is not None:
        k = torch.cat([k, arguments["bias_k"].expand(1, k.shape[1], -1).to(k.dtype)])
    q, k = (split(x.transpose(0, 1), heads) for x in (q, k))
    if arguments["static_k"] is not None:
        k = arguments["static_k"].unflatten(0, (-1, heads))
    if arguments["add_zero_attn"]:
        k = torch.cat([k, k.new_zeros(*k.shape[:2], 1, k.shape[3])], 2)
    return q, k


def infer_masks(hidden: Tensor | None, padding: Tensor | None, q: Tensor, k: Tensor) -> InferredRule:
    """Infer the rule and bias of both masks of nn.MultiheadAttention, in which True hides; added keys are visible."""
    bias: Tensor | None = None
    if hidden is not None:
        bias = make_additive(hidden, q).reshape(
            *((q.shape[0], q.shape[1]) if hidden.dim() == 3 else (1, 1)), *hidden.shape[-2:]
        )
    if padding is not None:
        padding = make_additive(padding, q).reshape(q.shape[0], 1, 1, -1)
        bias = padding if bias is None else bias + padding
    if bias is None:
        return EVERYTHING, 0, None
    return infer_rule(F.pad(bias, (0, k.shape[2] - bias.shape[-1])), q, k)


def make_additive(mask: Tensor, q: Tensor) -> Tensor:
    """Convert a mask of which True hides to one that is added to the scores; return a floating mask as it is."""
    return torch.zeros_like(mask, dtype=q.dtype).masked_fill_(mask, -torch.inf) if mask.dtype == torch.bool else mask


def intercept_encoder_layer(func: Callable[..., Tensor], x: Tensor, embed: int, heads: int, *rest: Any) -> Tensor:
    """Intercept torch._transformer_encoder_layer_fwd, the fast path of a whole layer."""
    weight, bias, _, _, _, norm_first, eps, norm_weight, norm_bias, *_ = rest

    def get_input() -> Tensor:
        return F.layer_norm(pad_nested(x), (embed,), norm_weight, norm_bias, eps) if norm_first else pad_nested(x)

    result: Tensor = intercept_fast_path(
        lambda: func(x, embed, heads, *rest), x, get_input, heads, (weight, bias), *rest[15:17]
    )
    return result


def intercept_native(
    func: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor, embed: int, heads: int, *rest: Any
) -> Any:
    """Intercept torch._native_multi_head_attention, the fast path of nn.MultiheadAttention."""
    weight, bias, _, _, mask, _, _, mask_type = rest
    return intercept_fast_path(
        lambda: func(query, key, value, embed, heads, *rest),
        query,
        lambda: pad_nested(query),
        heads,
        (weight, bias),
        mask,
        mask_type,
    )


def intercept_fast_path(
    run: Callable[[], Any], x: Tensor, entered: Callable[[], Tensor], heads: int, projection: Any, mask: Any, mask_type: Any
) -> Any:
    """Intercept a call of the fast path; mask_type 0 is (q, k), 1 is padding (b, k), 2 is both, (b, h, q, k)."""
    weight, bias = projection

    def read_call() -> tuple[AttentionCall, CallAdapter]:
        with torch.no_grad():
            y = unwrap_tensor(entered())
            c = y.shape[-1]
            q, k = (split(F.linear(y, weight[part], bias[part]), heads) for part in (slice(c), slice(c, 2 * c)))
            rule: Mask = EVERYTHING
            added: Tensor | None = None
            if mask is not None:
                shape = {0: (1, 1, *mask.shape[-2:]), 1: (mask.shape[0], 1, 1, mask.shape[-1])}.get(mask_type, mask.shape)
                rule, _, added = infer_once(
                    (mask,), q, k, lambda: infer_rule(make_additive(mask, q).reshape(shape), q, k), "True hides"
                )
            elif x.is_nested:
                lengths = torch.tensor([len(row) for row in x.unbind()])
                rule = infer_rule((torch.arange(k.shape[2]) < lengths.view(-1, 1, 1, 1)).to(q.device), q, k)[0]
        owner = STATE.frames[-1].module.modules()
        attention = next((m for m in owner if getattr(m, "in_proj_weight", None) is weight), None)
        return AttentionCall(
            kernel="fast path", q=q, k=k, mask=rule, bias=added, module=attention, is_cross=False, can_use_cache=False
        ), CallAdapter(run)

    return dispatch_call("fast path", run, read_call)


def pad_nested(x: Tensor) -> Tensor:
    """Return a nested tensor padded with zeros; any other as it is."""
    return x.to_padded_tensor(0.0) if x.is_nested else x
