"""Attention by compiled flex_attention: the mask becomes a BlockMask, softcap and bias a score_mod."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard.mechanism import kernels, spans
from regard.mechanism.mask_algebra import EVERYTHING, KeyRanges, Mask, Offset, QueryBlock, broadcast_index, find_key_ranges
from regard.mechanism.request import Request

BLOCK = 128  # queries and keys of a block of the BlockMask
NARROWEST = 16  # the least width flex_attention takes
MOST_COMPILED = 64  # forms of flex_attention that are compiled in one process: dtypes, settings, and masks of several ranges


def is_flex_preferred(request: Request) -> bool:
    """Return whether flex_attention is the best kernel: on a GPU, with more than one block of queries."""
    wide = min(request.q.shape[3], request.v.shape[3]) >= NARROWEST
    return request.q.is_cuda and wide and request.q.shape[2] > BLOCK


def run_flex(request: Request) -> Tensor:
    """Compute the context of a request by compiled flex_attention, or block by block where too many forms were compiled.

    Past its limit torch would run flex_attention without compiling it, with all scores in memory.
    """
    try:
        return apply_flex_attention(compile_flex_attention(), request)
    except torch._dynamo.exc.FailOnRecompileLimitHit:
        is_written = request.softcap is not None or not (
            request.sinks is None or kernels.can_hold_sinks(request.scale, request.q.dtype)
        )
        return kernels.run_formula_in_blocks(request) if is_written else kernels.run_sdpa_in_blocks(request)


def apply_flex_attention(flex_attention: Callable[..., Any], request: Request) -> Tensor:
    """Compute the context of a request by the given flex_attention, compiled or not."""
    from torch.nn.attention.flex_attention import AuxRequest

    q, k, v, mask, sinks = request.q, request.k, request.v, request.mask, request.sinks
    offset = request.offset if isinstance(request.offset, int) else tuple(request.offset.expand(q.shape[0]).tolist())
    block_mask = None if mask == EVERYTHING else make_block_mask(mask, q.shape[0], q.shape[2], k.shape[2], offset, q.device)
    options = {"scale": request.scale, "enable_gqa": q.shape[1] != k.shape[1], "score_mod": make_score_mod(request)}
    if sinks is None:
        output: Tensor = flex_attention(q, k, v, block_mask=block_mask, **options)
        return output
    context, aux = flex_attention(q, k, v, block_mask=block_mask, return_aux=AuxRequest(lse=True), **options)
    share = (aux.lse - sinks.view(-1, 1)).sigmoid()  # the keys' share of the denominator; 0 if a row sees nothing
    shared: Tensor = context * share.unsqueeze(-1).to(context.dtype)
    return shared


@functools.cache
def compile_flex_attention() -> Callable[..., Any]:
    """Return flex_attention, compiled on the first call; other compiled forms of it do not count towards its limit."""
    from torch.nn.attention.flex_attention import flex_attention

    compile_function: Callable[..., Callable[..., Any]] = torch.compile  # whose stubs lack its newest arguments
    return compile_function(flex_attention, fullgraph=True, recompile_limit=MOST_COMPILED, isolate_recompiles=True)


def make_score_mod(request: Request) -> Callable[..., Tensor] | None:
    """Return the score_mod for softcap and bias, which maps one scaled score; None if there is neither."""
    softcap, bias = request.softcap, request.bias
    if softcap is None and bias is None:
        return None

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if softcap is not None:
            score = softcap * (score / softcap).tanh()
        if bias is not None:
            score = score + bias[tuple(broadcast_index(n, size) for n, size in zip((b, h, i, j), bias.shape, strict=True))]
        return score

    return score_mod


def make_range_block_mask(ranges: KeyRanges, k: int, device: torch.device) -> Any:
    """Build the BlockMask of one range of keys for each query, (b or 1, q); all such masks share one compiled form."""
    from torch.nn.attention.flex_attention import BlockMask

    first, stop = (x.long() for x in ranges)
    is_blind = stop <= first
    rows, edges = -first.shape[1] % BLOCK, torch.arange(0, k, BLOCK)
    low, high = first.masked_fill(is_blind, k), stop.masked_fill(is_blind, 0)
    least, furthest = (pad_rows(x, rows, fill) for x, fill in ((low, k), (high, 0)))
    inner, outer = (pad_rows(x, rows, fill) for x, fill in ((first, 0), (high, k)))
    may = (edges + BLOCK > least.amin(-1, keepdim=True)) & (edges < furthest.amax(-1, keepdim=True))
    must = (edges >= inner.amax(-1, keepdim=True)) & ((edges + BLOCK).clamp(max=k) <= outer.amin(-1, keepdim=True))
    ends = [x.to(device) for x in ranges]

    def can_see(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        row = broadcast_index(b, len(ends[0]))
        is_visible: Tensor = (j >= ends[0][row, i]) & (j < ends[1][row, i])
        return is_visible

    return BlockMask.from_kv_blocks(
        *list_blocks(may & ~must, device),
        *list_blocks(may & must, device),
        BLOCK_SIZE=BLOCK,
        mask_mod=can_see,
        seq_lengths=(first.shape[1], k),
    )


def pad_rows(x: Tensor, rows: int, fill: int) -> Tensor:
    """Return x (b, q), padded by a number of rows, in blocks of BLOCK queries, (b, blocks, BLOCK)."""
    padded = torch.nn.functional.pad(x, (0, rows), value=fill)
    return padded.reshape(len(x), -1, BLOCK)


def list_blocks(table: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return how many blocks each row of a table (b, r, c) has, (b, 1, r), and which, (b, 1, r, c), as BlockMask takes them."""
    counts, order = table.sum(-1, dtype=torch.int32), table.int().argsort(dim=-1, descending=True, stable=True).int()
    return counts.unsqueeze(1).to(device), order.unsqueeze(1).to(device)


@functools.lru_cache(maxsize=8)
def make_block_mask(mask: Mask, batch: int, q: int, k: int, offset: int | tuple[int, ...], device: torch.device) -> Any:
    """Build flex_attention's BlockMask from the mask's own ranges or bounds rather than from its table."""
    ranges = find_key_ranges(mask, q, k, offset)
    if ranges is None:
        return make_bounded_block_mask(mask, q, k, offset, device)
    return make_range_block_mask(ranges, k, device)


def make_bounded_block_mask(mask: Mask, q: int, k: int, offset: int | tuple[int, ...], device: torch.device) -> Any:
    """Build the BlockMask of any mask from its bounds; each kind of mask is compiled anew."""
    from torch.nn.attention.flex_attention import BlockMask

    least, greatest = (offset, offset) if isinstance(offset, int) else (min(offset), max(offset))
    offset_on_device: Offset = offset if isinstance(offset, int) else torch.tensor(offset, device=device)
    full, partial = [], []
    for start in range(0, q, BLOCK):
        rows = QueryBlock(start, min(start + BLOCK, q), least, greatest)
        may = spans.align_spans(mask.find_possible_keys(rows, k), BLOCK, k)
        must = mask.find_certain_keys(rows, k)
        blocks = [block for i, j in may for block in range(i // BLOCK, -(-j // BLOCK))]
        full_blocks = [n for n in blocks if spans.is_superset(must, spans.clamp_span(n * BLOCK, (n + 1) * BLOCK, k))]
        full.append(full_blocks)
        partial.append([n for n in blocks if n not in set(full_blocks)])
    return BlockMask.from_kv_blocks(
        *pad_block_lists(partial, -(-k // BLOCK), device),
        *pad_block_lists(full, -(-k // BLOCK), device),
        BLOCK_SIZE=BLOCK,
        mask_mod=lambda b, h, i, j: mask.can_see(b, h, i, j, offset_on_device),
        seq_lengths=(q, k),
    )


def pad_block_lists(blocks: list[list[int]], most: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the number of blocks of each row, (1, 1, r), and their indices, (1, 1, r, most), as BlockMask takes them."""
    counts = torch.tensor([len(row) for row in blocks], dtype=torch.int32, device=device)
    padded = [row + [0] * (most - len(row)) for row in blocks]
    return counts[None, None], torch.tensor(padded, dtype=torch.int32, device=device)[None, None]
