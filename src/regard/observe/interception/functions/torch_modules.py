"""Interception of torch's own modules: nn.MultiheadAttention with weights, and the fast path of it and the encoder layers.

These call no attention function that could be intercepted, so queries and keys are projected again from the inputs.
"""

import inspect
import math
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.map.computed_bias import drop_repeated_axes
from regard.mechanism import attention
from regard.mechanism.heads import join, split
from regard.mechanism.mask_algebra import EVERYTHING, Mask
from regard.observe.interception.attention_call import AttentionCall, CallAdapter
from regard.observe.interception.call_dispatch import dispatch_call
from regard.observe.interception.forward_cache import infer_once
from regard.observe.interception.functions.nested_tensors import hide_padding, nest_like, pad_nested
from regard.observe.interception.functions.sdpa import SDPA, intercept_sdpa
from regard.observe.interception.patching import AttributePatch, PatchSet
from regard.observe.interception.plain_tensors import disable_modes, unwrap_tensor
from regard.observe.interception.provenance import has_separate_sources
from regard.observe.interception.thread_state import STATE
from regard.observe.stored_calls.mask_inference import InferredRule, infer_rule, infer_table_rule

FORWARD = F.multi_head_attention_forward
ENCODER_LAYER = torch._transformer_encoder_layer_fwd
NATIVE = torch._native_multi_head_attention
ARGUMENTS = inspect.signature(FORWARD)
UNREAD = (
    "its mask has numbers that torch's fast path, which runs in inference, does not add to the scores: there each number but 0 "
    "hides its key. With gradients, or after torch.backends.mha.set_fastpath_enabled(False), torch adds them"
)


def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> Any:
    """Replace the function of this name for torch's own modules, which look it up by name."""
    for x, heads in zip(STATE.sequences, args, strict=False):
        follow_tokens(x, heads)
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
        return run_and_follow(lambda: func(query, key, value, *args, **kwargs), query)

    if not STATE.is_active:
        return func(query, key, value, *args, **kwargs)
    asked = ARGUMENTS.bind_partial(query, key, value, *args, **kwargs)
    asked.apply_defaults()
    given = asked.arguments
    with disable_modes():
        crosses = not is_same_tensor(query, key) and has_separate_inputs(query, key)
        sequences = tuple(x.transpose(0, 1) for x in (query, key) if x.dim() == 3)
    if not given["need_weights"]:
        return call_with_patches(run, crosses, sequences)

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
        for x, heads in ((arguments["query"], q), (arguments["key"], k)):
            follow_tokens(x.transpose(0, 1), heads)
        mask, _, bias = infer_once(both, q, k, lambda: infer_masks(*both, q, k), "True hides")
    call = AttentionCall(kernel="multi head", q=q, k=k, mask=mask, bias=bias, is_cross=crosses, can_use_cache=False)
    return call, CallAdapter(run)


def call_with_patches(run: Callable[[], Any], crosses: bool, sequences: tuple[Tensor, ...]) -> Any:
    """Run the call with patched names; pass on to the kernel call in it whether it is cross, and q and k before projection."""
    before = STATE.is_cross, STATE.sequences
    STATE.is_cross, STATE.sequences = crosses, sequences
    try:
        with TORCH_PATCHES:
            return run()
    finally:
        STATE.is_cross, STATE.sequences = before


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
    weight, bias, out, out_bias, uses_gelu, norm_first, eps, *weights, mask, mask_type = rest
    norm, norm_bias, later_norm, later_bias, first, first_bias, second, second_bias = weights

    def normalize(y: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return F.layer_norm(y, (embed,), scale, shift, eps)

    def get_input() -> Tensor:
        return normalize(pad_nested(x), norm, norm_bias) if norm_first else pad_nested(x)

    def finish(context: Tensor) -> Tensor:
        y = pad_nested(x) + F.linear(join(context), out, out_bias)
        y = y if norm_first else normalize(y, norm, norm_bias)
        z = F.linear(normalize(y, later_norm, later_bias) if norm_first else y, first, first_bias)
        y = y + F.linear(F.gelu(z) if uses_gelu else F.relu(z), second, second_bias)
        return nest_like(y if norm_first else normalize(y, later_norm, later_bias), x)

    arguments = x, get_input, heads, (weight, bias), (mask, mask_type), finish
    result: Tensor = intercept_fast_path(lambda: func(x, embed, heads, *rest), *arguments)
    return result


def intercept_native(func: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor, *given: Any) -> Any:
    """Intercept torch._native_multi_head_attention, the fast path of nn.MultiheadAttention."""
    _, heads, weight, bias, out, out_bias, mask, need_weights, _, mask_type = given

    def finish(context: Tensor) -> tuple[Tensor, None]:
        return nest_like(F.linear(join(context), out, out_bias), query), None

    arguments = lambda: pad_nested(query), heads, (weight, bias), (mask, mask_type), None if need_weights else finish
    return intercept_fast_path(lambda: func(query, key, value, *given), query, *arguments)


def intercept_fast_path(
    run: Callable[[], Any],
    x: Tensor,
    get_input: Callable[[], Tensor],
    heads: int,
    projection: tuple[Tensor, Tensor],
    masking: tuple[Tensor | None, int | None],
    finish: Callable[[Tensor], Any] | None,
) -> Any:
    """Intercept a call of the fast path, in which every number of the mask but 0 hides a key.

    The mask's type 0 is (q, k), 1 is padding (b, k), 2 is both, (b, h, q, k). `finish` makes the result of a context
    (b, h, q, e); None where the result has weights too.
    """
    (weight, bias), (mask, mask_type) = projection, masking

    def read_call() -> tuple[AttentionCall, CallAdapter]:
        needs_values = any(watcher.can_change_calls or watcher.needs_graph for watcher in STATE.watchers)
        y = unwrap_tensor(get_input())
        c = y.shape[-1]
        parts = [slice(n * c, (n + 1) * c) for n in range(3 if needs_values else 2)]
        q, k, *values = (split(F.linear(y, weight[part], bias[part]), heads) for part in parts)
        follow_tokens(x, q, k)
        hidden = HiddenKeys.from_mask(find_nested_padding() if x.is_nested else mask, x.is_nested or mask_type == 1, q, k)
        unread = hidden.find_unread(q, k)
        owner = STATE.frames[-1].module.modules()
        call = AttentionCall(
            kernel="fast path",
            q=q,
            k=k,
            v=values[0] if values else None,
            mask=hide_padding(x, x) if x.is_nested else hidden.rule,
            module=next((m for m in owner if getattr(m, "in_proj_weight", None) is weight), None),
            is_cross=False,
            can_use_cache=False,
            unread_bias=unread,
            note="" if unread is None else UNREAD,
        )
        runs = partial(run_and_follow, run, x)
        if finish is None or not values:
            return call, CallAdapter(runs)
        return call, make_adapter(runs, lambda: attention(q, k, values[0], call.mask), hidden.blind, finish)

    return dispatch_call("fast path", run, read_call)


def run_and_follow(run: Callable[[], Any], x: Tensor) -> Any:
    """Run a call of the fast path and return its result, of which every token is made where its query was."""
    result = run()
    follow_tokens(x, result[0] if isinstance(result, tuple) else result)
    return result


def follow_tokens(x: Tensor, *results: Tensor) -> None:
    """Follow the positions of pixels from tokens x (b, t, c) to what was made of each of them."""
    if STATE.mode is not None and STATE.mode.positions.stored and x.dim() == 3 and not x.is_nested:
        STATE.mode.follow_positions(STATE.mode.positions.follow_tokens, x, *results)


class HiddenKeys(NamedTuple):
    """How the fast path reads a mask: the rule, the rows (b, h, q, 1) that see nothing, and the mask's own numbers.

    `largest` is that of the numbers that hide and are not -inf: inf where a row that sees nothing has one, -inf without any.
    """

    rule: Mask = EVERYTHING
    blind: Tensor | None = None
    numbers: Tensor | None = None
    largest: float = -math.inf

    @classmethod
    def from_mask(cls, mask: Tensor | None, is_padding: bool, q: Tensor, k: Tensor) -> "HiddenKeys":
        """Read a mask (b, k) if it is padding, else (q, k) or (b, h, q, k); once per forward for all layers that share it."""
        if mask is None:
            return cls()
        mask = mask[:, None, None] if is_padding else mask.expand(1, 1, -1, -1) if mask.dim() == 2 else mask
        numbers = drop_repeated_axes(make_additive(mask, q))
        return infer_once((numbers,), q, k, lambda: cls.from_numbers(numbers, q.shape[2], k.shape[2]), "numbers hide")

    @classmethod
    def from_numbers(cls, numbers: Tensor, queries: int, keys: int) -> "HiddenKeys":
        """Read numbers with four axes."""
        hides = numbers != 0
        blind, is_other = hides.all(-1, keepdim=True), hides & (numbers != -torch.inf)
        largest = float(numbers[is_other].max()) if is_other.any() else -math.inf
        rule = infer_table_rule(~hides, queries, keys)[0]
        return cls(rule, blind, numbers, math.inf if (blind & is_other).any() else largest)

    def find_unread(self, q: Tensor, k: Tensor) -> Tensor | None:
        """Return the numbers, if the softmax of the scores with them added has other weights than 0 where they hide."""
        if self.largest == -math.inf:
            return None
        spread = 2 * float(q.norm(dim=-1).max() * k.norm(dim=-1).max()) * q.shape[-1] ** -0.5  # of scores, at most
        smallest = math.log(torch.finfo(q.dtype).tiny) + math.log(torch.finfo(q.dtype).eps / 2)
        return None if self.largest + spread < smallest else self.numbers


def make_adapter(
    run: Callable[[], Any], attend: Callable[[], Tensor], blind: Tensor | None, finish: Callable[[Tensor], Any]
) -> CallAdapter:
    """Return the adapter of a call whose result does not hold its context: it is computed, or that of the last change.

    Rows that see nothing (`blind`) are NaN, as the fast path makes them.
    """
    last: list[Any] = [None, None]  # what `finish` made, and of which context

    def read(result: Any) -> Tensor:
        return last[1] if last[0] is result else attend()

    def write(context: Tensor, _: Any) -> Any:
        last[:] = finish(context if blind is None else context.masked_fill(blind, torch.nan)), context
        return last[0]

    return CallAdapter(run, read, write, is_reversible=False)


def find_nested_padding() -> Tensor | None:
    """Return the numbers (b, t) of the padding by which a running nn.TransformerEncoder nested its input; None without one."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not nn.TransformerEncoder.forward.__code__:
        frame = frame.f_back
    padding: Tensor | None = None if frame is None else frame.f_locals["src_key_padding_mask"]
    return padding
