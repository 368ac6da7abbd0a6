"""Interception of block-sparse attention of transformers: Longformer, LED, BigBird and BigBird-Pegasus.

Their modules compute scores by chunks or blocks. The call that is dispatched has the queries and keys of the whole
sequence and a rule that says which keys each query sees; its context is compared with the module's own on sampled rows.
transformers is never imported here.
"""

import math
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from regard.mechanism import attend
from regard.mechanism.mask_algebra import Mask
from regard.mechanism.masks import Documents, Given, Window
from regard.mechanism.scores import score_dtype
from regard.observe.interception.attention_call import AttentionCall, CallAdapter
from regard.observe.interception.functions.method_wrapper import wrap_method
from regard.observe.interception.patching import AttributePatch
from regard.observe.interception.plain_tensors import UnreadableError
from regard.observe.interception.thread_state import InterceptionPause

MODELS = "transformers.models"
SLIDING = {
    f"{MODELS}.longformer.modeling_longformer": "LongformerSelfAttention",
    f"{MODELS}.led.modeling_led": "LEDEncoderSelfAttention",
}
BLOCKED = {
    f"{MODELS}.big_bird.modeling_big_bird": "BigBirdBlockSparseAttention",
    f"{MODELS}.bigbird_pegasus.modeling_bigbird_pegasus": "BigBirdPegasusBlockSparseAttention",
}
SCORES, VALUES, BLOCKS = (
    "_sliding_chunks_query_key_matmul",
    "_sliding_chunks_matmul_attn_probs_value",
    "_create_rand_mask_from_inputs",
)
SAMPLED_ROWS = 8


class Seen(threading.local):
    """What the running module passed to its own functions, by the name of the function: the arguments of the first call."""

    arguments: dict[str, Any] | None = None


SEEN = Seen()


@contextmanager
def watch_arguments() -> Iterator[dict[str, Any]]:
    """Keep the arguments of the module's own functions while the context is active."""
    before, SEEN.arguments = SEEN.arguments, {}
    try:
        yield SEEN.arguments
    finally:
        SEEN.arguments = before


def build_patches() -> list[AttributePatch]:
    """Return the attribute patches for those of the modules that the program has imported."""
    patches: list[AttributePatch] = []
    for names, method, inner, reader in (
        (SLIDING, "forward", (SCORES, VALUES), read_sliding_call),
        (BLOCKED, "bigbird_block_sparse_attention", (BLOCKS,), read_blocked_call),
    ):
        for path, name in names.items():
            owner = getattr(sys.modules.get(path), name, None)
            if owner is not None and all(one in vars(owner) for one in (method, *inner)):
                kernel = f"{path.split('.')[2]}: block-sparse"
                patches.append((owner, method, wrap_method(vars(owner)[method], reader, kernel, watch_arguments)))
                patches += [(owner, one, wrap_function(vars(owner)[one], one)) for one in inner]
    return patches


def wrap_function(original: Any, name: str) -> Any:
    """Return a wrapper of a method or static method that keeps the arguments of its first call while they are watched."""
    function = original.__func__ if isinstance(original, staticmethod) else original

    @wraps(function)
    def keep_arguments(*args: Any, **kwargs: Any) -> Any:
        if SEEN.arguments is not None:
            SEEN.arguments.setdefault(name, signature(function).bind(*args, **kwargs).arguments)
        return function(*args, **kwargs)

    return staticmethod(keep_arguments) if isinstance(original, staticmethod) else keep_arguments


def read_sliding_call(
    kernel: str, module: Any, arguments: dict[str, Any], matrix: dict[str, Any], result: Any
) -> tuple[AttentionCall, CallAdapter]:
    """Read a call of Longformer's attention: a window, and global tokens that see all and that all see.

    Queries that are global have projections of their own: their queries and keys are further dimensions of the product, and
    their values are not kept.
    """
    query, key, w = (matrix[SCORES][name] for name in ("query", "key", "window_overlap"))
    q, k, v = (x.detach().transpose(1, 2) for x in (query, key, matrix[VALUES]["value"]))
    mask = arguments["attention_mask"].reshape(q.shape[0], -1)
    real, shared = mask >= 0, mask > 0
    rule: Mask = Window(w, w)
    values: tuple[Tensor, Tensor] | None = None
    if arguments.get("is_global_attn"):
        rule = rule | Given(shared[:, None, None]) | Given(shared[:, None, :, None])
        q, k, other = add_global_tokens(module, arguments["hidden_states"], q, k, shared)
        values = v, other
    if not bool(real.all()):
        rule = rule & Given(real[:, None, None]) & Given(real[:, None, :, None])
    heads, drops = q.shape[1], module.dropout if module.training else 0.0
    call = AttentionCall(
        kernel=kernel, q=q, k=k, v=v if values is None else None, mask=rule, scale=1.0, dropout=drops, module=module
    )
    call.is_cross = call.can_use_cache = False

    def read_context(out: Any) -> Tensor:
        context: Tensor = out[0].unflatten(-1, (heads, -1)).transpose(1, 2)
        return context

    check_context(call, v, read_context(result), torch.float32, values, shared)
    if values is not None:
        call.note = "its global tokens have values of their own, so values are not kept"
        return call, CallAdapter(lambda: result)
    return call, CallAdapter(lambda: result, read_context, lambda new, out: (new.transpose(1, 2).flatten(2), *out[1:]))


def add_global_tokens(module: Any, hidden: Tensor, q: Tensor, k: Tensor, shared: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries (b, h, q, 2d) and keys (b, h, k, 2d) whose product is that of each query's projection, and values."""
    with InterceptionPause():
        query, key, value = (
            project(hidden.detach()).unflatten(-1, (q.shape[1], -1)).transpose(1, 2).detach()
            for project in (module.query_global, module.key_global, module.value_global)
        )
    is_global = shared[:, None, :, None]
    q = torch.cat([q.masked_fill(is_global, 0), (query / math.sqrt(module.head_dim)).masked_fill(~is_global, 0)], -1)
    return q, torch.cat([k, key], -1), value


def read_blocked_call(
    kernel: str, module: Any, arguments: dict[str, Any], matrix: dict[str, Any], result: Any
) -> tuple[AttentionCall, CallAdapter]:
    """Read a call of BigBird's attention: a band of blocks, the first and the last block, and the random ones it drew.

    A block that it counts several times has a larger score in one further dimension of the product.
    """
    q, k, v = (arguments[name].detach() for name in ("query_layer", "key_layer", "value_layer"))
    size, drawn = arguments["to_block_size"], matrix[BLOCKS]["rand_attn"]
    blocks = torch.arange(q.shape[2], device=q.device) // size
    is_end = (blocks == 0) | (blocks == blocks[-1])
    rule: Mask = Given(is_end[None, None, None]) | Given(is_end[None, None, :, None])
    for step in (-1, 0, 1):
        rule = rule | Documents(blocks + step, blocks)
    q = q / math.sqrt(q.shape[-1])
    note = ""
    if not bool(drawn.any()):  # outside training, all are the first block
        q = torch.cat([q, (~is_end).to(q.dtype).view(1, 1, -1, 1).expand(*q.shape[:3], 1)], -1)
        more = torch.zeros(len(blocks), dtype=k.dtype, device=k.device).masked_fill_(blocks == 0, math.log1p(drawn.shape[-1]))
        k = torch.cat([k, more.view(1, 1, -1, 1).expand(*k.shape[:3], 1)], -1)
    else:
        table = build_block_table(drawn[:1], size)
        rule = rule | Given.from_shared_table(table)
        note = f"its random blocks differ from head to head: {table.nbytes:,} bytes of a table are kept"
    rows, columns = arguments["from_mask"] > 0, arguments["to_mask"] > 0  # (b, 1, q, 1) and (b, 1, 1, k)
    if not bool(rows.all() and columns.all()):
        rule = rule & Given(columns) & Given(rows)
    call = AttentionCall(kernel=kernel, q=q, k=k, v=v, mask=rule, scale=1.0, module=module, note=note)
    call.is_cross = call.can_use_cache = False
    check_context(call, v, result[0].transpose(1, 2), v.dtype)
    return call, CallAdapter(
        lambda: result, lambda out: out[0].transpose(1, 2), lambda new, out: (new.transpose(1, 2), *out[1:])
    )


def build_block_table(drawn: Tensor, size: int) -> Tensor:
    """Return the table (1, h, t, t) of the blocks that were drawn (1, h, blocks - 2, n) for all but the first and last block.

    Raises UnreadableError if a block was drawn twice, or lies in the band or at an end, where it would count twice.
    """
    inner, count = drawn.shape[2], drawn.shape[2] + 2
    own = torch.arange(1, inner + 1, device=drawn.device)[:, None]
    twice = (drawn.sort(-1).values.diff(dim=-1) == 0).any()
    if bool(twice | ((drawn - own).abs() <= 1).any() | (drawn == 0).any() | (drawn == count - 1).any()):
        raise UnreadableError("one of its random blocks counts twice")
    table = torch.zeros(*drawn.shape[:2], count, count, dtype=torch.bool, device=drawn.device)
    table[:, :, 1:-1].scatter_(-1, drawn, True)
    return table.repeat_interleave(size, 2).repeat_interleave(size, 3)


def check_context(
    call: AttentionCall,
    v: Tensor,
    context: Tensor,
    softmax: torch.dtype,
    values: tuple[Tensor, Tensor] | None = None,
    shared: Tensor | None = None,
) -> None:
    """Raise UnreadableError if the context of a call differs from the module's own on sampled rows; skipped under dropout.

    Queries that are `shared` (b, q) have the second of `values`.
    """
    if call.dropout:
        return
    t = call.q.shape[2]
    rows = torch.arange(0, t, max(1, t // SAMPLED_ROWS), device=v.device)
    if shared is not None and bool(shared.any()):
        rows = torch.cat([rows, shared.any(0).nonzero().flatten()[:1]])
    table = Given.from_shared_table(call.mask.block(rows, torch.arange(t, device=v.device), call.offset))
    weights = attend(call.q[:, :, rows], call.k, call.k, table, scale=call.scale).weights
    kind = score_dtype(v.dtype)
    ours = weights.to(kind) @ v.to(kind)
    if values is not None and shared is not None:
        ours = torch.where(shared[:, None, rows, None], weights.to(kind) @ values[1].to(kind), ours)
    eps = max(torch.finfo(softmax).eps, torch.finfo(v.dtype).eps)
    scores = call.q[:, :, rows].norm(dim=-1).amax() * call.k.norm(dim=-1).amax()
    tolerance = 8 * eps * (1 + float(scores) + v.shape[-1]) * float(v.abs().amax())
    difference = float((ours - context.detach()[:, :, rows].to(kind)).abs().amax())
    if not difference <= tolerance:
        raise UnreadableError(f"its context differs from that of its rule by {difference:.2g}")
