"""Attention by compiled flex_attention: the mask becomes a BlockMask, softcap and bias a score_mod."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard.errors import TooLargeError
from regard.mechanism import kernels, spans
from regard.mechanism.mask_algebra import EVERYTHING, KeyRanges, Mask, QueryBlock, broadcast_index, find_key_ranges
from regard.mechanism.request import Request

BLOCK = 128  # queries and keys of a block of the BlockMask
NARROWEST = 16  # the least width flex_attention takes
MOST_COMPILED = 64  # forms of flex_attention that are compiled in one process, for dtypes and settings
TABLE_BYTES = 2**28  # of the blocks that a mask cuts: 16 KiB each


def is_flex_preferred(request: Request) -> bool:
    """Return whether flex_attention is the best kernel: on a GPU, with more than one block of queries."""
    wide = min(request.q.shape[3], request.v.shape[3]) >= NARROWEST
    return request.q.is_cuda and wide and request.q.shape[2] > BLOCK


def run_flex(request: Request) -> Tensor:
    """Compute the context of a request by compiled flex_attention; in blocks of queries where it cannot be.

    Past the limit of compiled forms torch would run flex_attention without compiling it, with all scores in memory.
    """
    try:
        return apply_flex_attention(compile_flex_attention(), request)
    except (torch._dynamo.exc.FailOnRecompileLimitHit, TooLargeError):
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
    rows, edges = -first.shape[1] % BLOCK, torch.arange(0, k, BLOCK, device="cpu")
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


@functools.lru_cache(maxsize=4)
def make_block_mask(mask: Mask, batch: int, q: int, k: int, offset: int | tuple[int, ...], device: torch.device) -> Any:
    """Build flex_attention's BlockMask from the mask's own ranges or bounds rather than from its whole table."""
    ranges = find_key_ranges(mask, q, k, offset)
    return make_table_block_mask(mask, q, k, offset, device) if ranges is None else make_range_block_mask(ranges, k, device)


def make_table_block_mask(mask: Mask, q: int, k: int, offset: int | tuple[int, ...], device: torch.device) -> Any:
    """Build the BlockMask of any mask from the tables of the blocks that it cuts; all such masks share one compiled form.

    Raises TooLargeError if these tables are larger than TABLE_BYTES.
    """
    from torch.nn.attention.flex_attention import BlockMask

    offsets = (offset,) if isinstance(offset, int) else offset
    starts, columns = range(0, q, BLOCK), -(-k // BLOCK)
    may, must = (torch.zeros(len(starts), columns, dtype=torch.bool, device="cpu") for _ in range(2))
    for r, start in enumerate(starts):
        rows = QueryBlock(start, min(start + BLOCK, q), min(offsets), max(offsets))
        certain = mask.find_certain_keys(rows, k)
        for i, j in spans.align_spans(mask.find_possible_keys(rows, k), BLOCK, k):
            for c in range(i // BLOCK, -(-j // BLOCK)):
                may[r, c], must[r, c] = True, spans.is_superset(certain, spans.clamp_span(c * BLOCK, (c + 1) * BLOCK, k))
    partial, full = may & ~must, may & must
    tables = compute_tables(mask, partial, q, k, offset, device)
    number = torch.where(partial, partial.flatten().cumsum(0).view_as(partial) + 1, full.int()).to(device)

    def can_see(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        row, head = broadcast_index(b, len(tables)), broadcast_index(h, len(tables[0]))
        is_visible: Tensor = tables[row, head, number[i // BLOCK, j // BLOCK], i % BLOCK, j % BLOCK]
        return is_visible

    return BlockMask.from_kv_blocks(
        *list_blocks(partial[None], device),
        *list_blocks(full[None], device),
        BLOCK_SIZE=BLOCK,
        mask_mod=can_see,
        seq_lengths=(q, k),
    )


def compute_tables(mask: Mask, partial: Tensor, q: int, k: int, offset: int | tuple[int, ...], device: torch.device) -> Tensor:
    """Return the tables of the blocks (r, c) that are partial, in order, after one of an empty and one of a full block.

    They are (b or 1, h or 1, 2 + n, BLOCK, BLOCK). Raises TooLargeError if they are larger than TABLE_BYTES.
    """
    offsets = offset if isinstance(offset, int) else torch.tensor(offset, device=device)
    batch, count = mask.batch if isinstance(offset, int) else len(offset), 2 + int(partial.sum())
    if batch * mask.heads * count * BLOCK**2 > TABLE_BYTES:
        raise TooLargeError(f"the mask cuts {count - 2} blocks, whose tables take more than {TABLE_BYTES} bytes.")
    tables = torch.zeros(batch, mask.heads, count, BLOCK, BLOCK, dtype=torch.bool, device=device)
    tables[:, :, 1], done = True, 2
    for r, row in enumerate(partial):
        cut = row.nonzero().to(device)  # (n, 1)
        queries = torch.arange(r * BLOCK, (r + 1) * BLOCK, device=device).clamp(max=q - 1)
        keys = (cut * BLOCK + torch.arange(BLOCK, device=device)).flatten().clamp(max=k - 1)
        table = mask.block(queries, keys, offsets).expand(batch, mask.heads, BLOCK, len(keys))
        tables[:, :, done : done + len(cut)] = table.unflatten(-1, (-1, BLOCK)).transpose(2, 3)
        done += len(cut)
    return tables
