"""Interception of Hugging Face's attention registry: every function that a model looks up there is wrapped.

transformers is never imported here. Where the program has imported it, its registry class returns a wrapper of the function
that it would have returned, so masks, dispatch and the program's own entries do not change.
"""

import sys
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor

from regard.mechanism.mask_algebra import EVERYTHING, Mask
from regard.mechanism.masks import Causal, Documents, Given, Window
from regard.observe.interception.attention_call import AttentionCall, CallAdapter
from regard.observe.interception.call_dispatch import dispatch_call
from regard.observe.interception.forward_cache import infer_mask_rule, infer_once
from regard.observe.interception.functions.distributed_tensors import distribute_like, make_part_adapter, take_local_heads
from regard.observe.interception.functions.flex import infer_block_mask
from regard.observe.interception.patching import AttributePatch
from regard.observe.interception.plain_tensors import UnreadableError, is_distributed, unwrap_tensor
from regard.observe.interception.provenance import has_separate_sources
from regard.observe.interception.thread_state import STATE
from regard.observe.stored_calls.mask_inference import InferredRule, infer_rule_with_bias

MODULE = "transformers.modeling_utils"
GENERATION = "transformers.generation.utils"
CAPTURING = "transformers.utils.output_capturing"
MASKED = ("eager", "flex_attention")  # not causal without a mask
PAGES = "keys and values are in pages of a cache that only the kernel reads"


def build_patches() -> list[AttributePatch]:
    """Return the attribute patches for the two registry look-ups and for `generate`; none if transformers is not imported."""
    interface, generation = getattr(sys.modules.get(MODULE), "AttentionInterface", None), sys.modules.get(GENERATION)
    if interface is None:
        return []
    mixin = getattr(generation, "GenerationMixin", None)
    generating = [] if mixin is None else [(mixin, "generate", wrap_generate(vars(mixin)["generate"]))]
    general, item = interface.__mro__[1], interface.__getitem__
    get = general.get

    def get_or_default(self: Any, key: str, default: Any = None) -> Any:
        function = get(self, key, default)
        return wrap_function(function, key) if isinstance(self, interface) and function is not None else function

    def get_item(self: Any, key: str) -> Callable[..., Any]:
        return wrap_function(item(self, key), key)

    # get_interface, whose super() torch.compile could not inline from a patch, calls the first of them
    return [(general, "get", get_or_default), (interface, "__getitem__", get_item), *generating]


def wrap_generate(generate: Callable[..., Any]) -> Callable[..., Any]:
    """Return transformers' `generate`, wrapped so that it passes its output and arguments to the watchers of its model."""

    @wraps(generate)
    def generate_and_report(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = generate(self, *args, **kwargs)
        sequences = getattr(output, "sequences", output)
        prompts = next((len(x) for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.dim() > 1), 1)
        for watcher in STATE.watchers if isinstance(sequences, Tensor) and sequences.dim() == 2 else ():
            if id(self) in watcher.names:
                watcher.handle_generation(self, sequences, prompts, kwargs)
        return output

    return generate_and_report


def wrap_function(function: Callable[..., Any], implementation: str) -> Callable[..., Any]:
    """Return a wrapper that intercepts the function; the function itself if it is one or nothing is recorded now."""
    if isinstance(function, RegistryWrapper) or not STATE.is_active:
        return function
    return RegistryWrapper(intercept_registry, function, str(implementation))


class RegistryWrapper(partial):  # type: ignore[type-arg]
    """A wrapped function of the registry, called like the function itself."""


def intercept_registry(
    function: Callable[..., Any],
    implementation: str,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Intercept the call of a registry function.

    Its arguments are (module, q, k, v, mask, dropout=, scaling=, ...), its result (context (b, q, h, e), weights or None).
    """
    run = partial(function, module, query, key, value, attention_mask, *args, **kwargs)
    if "flash" not in implementation and is_paged(implementation, kwargs):
        return run()  # it gathers the pages and calls a kernel that is intercepted itself
    read = partial(read_call, run, implementation, module, query, key, value, attention_mask, kwargs)
    return dispatch_call(f"attention registry: {implementation}", run, read)


def is_paged(implementation: str, options: dict[str, Any]) -> bool:
    """Return whether keys and values lie in pages of a cache, which only the called function can read."""
    return options.get("cache") is not None or implementation.startswith("paged")


def read_call(run: Callable[[], Any], implementation: str, *asked: Any) -> tuple[AttentionCall, CallAdapter]:
    """Read the call and return how to run it; its result is (context (b, q, h, e), weights, ...)."""
    call = build_call(implementation, *asked)
    if any(map(is_distributed, asked[1:4])):
        return call, make_part_adapter(
            call,
            asked[1],
            run,
            lambda out: out[0].transpose(1, 2),
            lambda new, out: (distribute_like(new.transpose(1, 2), out[0]), *out[1:]),
        )
    adapter = CallAdapter(
        run, lambda out: out[0].transpose(1, 2), lambda new, out: (new.transpose(1, 2).contiguous(), *out[1:])
    )
    if implementation.endswith("eager"):
        adapter.read_weights = lambda out: out[1]
    if should_return_attentions(asked[-1]):
        adapter.replace_weights = lambda out, found: (out[0], found, *out[2:])
    return call, adapter


def build_call(
    implementation: str, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, options: dict[str, Any]
) -> AttentionCall:
    """Read the call. Raises UnreadableError if its keys or its mask are of an unknown kind."""
    if is_paged(implementation, options):
        raise UnreadableError(PAGES)
    sources = has_separate_sources(STATE.frames, query, key)
    note, part = "", None
    if any(map(is_distributed, (query, key, value))):
        query, key, value, mask, part, note = take_local_heads(query, key, value, mask)
    q, k, v = unwrap_tensor(query), unwrap_tensor(key), unwrap_tensor(value)
    if not q.shape[0] == k.shape[0] == v.shape[0]:  # a batch of 1 broadcasts
        b = max(q.shape[0], k.shape[0])
        q, k, v = (x.expand(b, *x.shape[1:]) for x in (q, k, v))
    causal = options.get("is_causal")
    causal = bool(getattr(module, "is_causal", True) if causal is None else causal) and q.shape[2] > 1
    room = 0
    if "flash" in implementation:
        rule, offset, bias = *infer_flash_rule(q, k, mask, causal, options), None
    else:
        causal = causal and mask is None and implementation not in MASKED
        if causal and k.shape[2] > q.shape[2]:  # aligned to the first key: further keys are unwritten slots of a cache
            room = k.shape[2] - q.shape[2]
            k, v = (x[:, :, : q.shape[2]] for x in (k, v))
        rule, offset, bias = infer_mask(mask, causal, shift_rows(options), q, k)
    scale, sinks = options.get("scaling"), options.get("s_aux")
    if options.get("sinks") is not None:
        sinks = q.new_zeros(q.shape[1])
    return AttentionCall(
        kernel=f"attention registry: {implementation}",
        q=q,
        k=k,
        v=v,
        mask=rule,
        scale=None if scale is None else float(scale),
        softcap=options.get("softcap"),
        bias=bias,
        sinks=None if sinks is None else unwrap_tensor(sinks).reshape(-1),
        offset=offset,
        dropout=float(options.get("dropout") or 0.0),
        module=module,
        unwritten_keys=room,
        has_separate_sources=sources,
        note=note,
        rank_part=part,
    )


def shift_rows(options: dict[str, Any]) -> Tensor | None:
    """Return the position bias of a call, without the sinks (b, h, q, 1) that each query may have: each row has a sink of 0."""
    bias: Tensor | None = options.get("position_bias")
    sinks: Tensor | None = options.get("sinks")
    if sinks is None:
        return bias
    return -sinks if bias is None else bias - sinks


def infer_mask(mask: Any, causal: bool, bias: Tensor | None, q: Tensor, k: Tensor) -> InferredRule:
    """Infer the rule, offset and bias of a mask (None, a tensor or a block mask) and of a position bias added to it."""
    bias = None if bias is None or not bias.any() else unwrap_tensor(bias).detach()[..., : k.shape[2]]
    if mask is not None and not isinstance(mask, Tensor):
        found = infer_block_mask(mask, q, k)
        if found is None:
            raise UnreadableError(f"a mask of type {type(mask).__name__} is not supported")
        return *found, bias
    if mask is not None:
        mask = unwrap_tensor(mask)
        mask = mask[(None,) * (4 - mask.dim())][..., : k.shape[2]]
    if bias is not None:
        added = bias
        return infer_once((mask, added), q, k, lambda: infer_rule_with_bias(mask, causal, added.clone(), q, k), causal)
    return (Causal() if causal else EVERYTHING, 0, None) if mask is None else infer_mask_rule(mask, q, k)


def infer_flash_rule(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, options: dict[str, Any]) -> tuple[Mask, int]:
    """Return the rule and offset of a call of the flash-attention package.

    Its rule is aligned to the last key, its mask (b, k) is True for real keys, and `cu_seq_lens_k` holds the ends of documents.
    """
    offset = k.shape[2] - q.shape[2]
    rule: Mask = Causal() if causal else EVERYTHING
    window = options.get("sliding_window")
    if window is not None and k.shape[2] > window:
        rule &= Window(window - 1, 0 if causal else window - 1)
    if mask is not None:
        rule &= Given.from_shared_table(mask[:, None, None, -k.shape[2] :].to(torch.bool, copy=True))
    ends = options.get("cu_seq_lens_k")
    if ends is not None and q.shape[2] == k.shape[2]:
        rule &= Documents(torch.searchsorted(ends[1:].contiguous(), torch.arange(k.shape[2], device=ends.device), right=True))
    return rule, offset


def should_return_attentions(options: dict[str, Any]) -> bool:
    """Return whether the forward should return attentions: by its own argument, or by transformers' output capturing."""
    if options.get("output_attentions"):
        return True
    capturing = sys.modules.get(CAPTURING)
    captured_outputs = capturing._active_collector.get() if capturing is not None else None
    return any("attentions" in key for key in captured_outputs) if captured_outputs else False
