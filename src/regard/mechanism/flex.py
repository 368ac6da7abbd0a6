"""Attention by compiled flex_attention: the mask becomes a BlockMask, softcap and bias a score_mod."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from regard.errors import TooLargeError
from regard.mechanism import kernels
from regard.mechanism.mask_algebra import EVERYTHING, KeyRanges, Mask, QueryBlock, broadcast_index, find_key_ranges
from regard.mechanism.request import Request
from regard.mechanism.spans import Spans

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128  # queries and keys of a block of the BlockMask
NARROWEST = 16  # the least width flex_attention takes
MOST_COMPILED = 64  # forms of flex_attention that are compiled in one process, for dtypes and settings
CUT_BYTES = 2**27  # of tables of the blocks that a mask cuts, 16 KiB each; several masks are held at a time


def is_flex_preferred(request: Request) -> bool:
    """Return whether flex_attention is the best kernel: on a GPU, with more than one block of queries."""
    wide = min(request.q.shape[3], request.v.shape[3]) >= NARROWEST
    return request.q.is_cuda and wide and request.q.shape[2] > BLOCK


def run_flex(request: Request) -> Tensor:
    """Compute the context of a request by compiled flex_attention.

    In blocks of queries, after a warning, for a mask that cuts too many blocks, and past the limit of compiled forms, where
    torch would run flex_attention without compiling it, with all scores in memory.
    """
    try:
        return apply_flex_attention(compile_flex_attention(), request)
    except (torch._dynamo.exc.FailOnRecompileLimitHit, TooLargeError) as error:
        reason = str(error).strip().split("\n")[0]
        warnings.warn(f"attention is computed in blocks of queries, not by flex_attention: {reason}", stacklevel=3)
        is_written = request.softcap is not None or not (
            request.sinks is None or kernels.can_hold_sinks(request.scale, request.q.dtype)
        )
        return kernels.run_formula_in_blocks(request) if is_written else kernels.run_sdpa_in_blocks(request)


def apply_flex_attention(flex_attention: Callable[..., Any], request: Request) -> Tensor:
    """Compute the context of a request by the given flex_attention, compiled or not.

    Raises TooLargeError for a mask that cuts too many blocks.
    """
    from torch.nn.attention.flex_attention import AuxRequest

    q, k, v, mask, sinks = request.q, request.k, request.v, request.mask, request.sinks
    block_mask = None
    if mask != EVERYTHING:
        block_mask = make_block_mask(mask, q.shape[0], q.shape[2], k.shape[2], request.list_offsets(), q.device)
        if block_mask is None:
            raise TooLargeError(f"{mask} hides a part of so many blocks of {BLOCK} x {BLOCK} that their tables are too large.")
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


def make_range_block_mask(ranges: KeyRanges, k: int, device: torch.device) -> BlockMask:
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
def make_block_mask(
    mask: Mask, batch: int, q: int, k: int, offset: int | tuple[int, ...], device: torch.device
) -> BlockMask | None:
    """Build flex_attention's BlockMask from the mask's own ranges or bounds; None if the mask cuts too many blocks."""
    with torch.inference_mode(False):  # it is used again, maybe in training
        ranges = find_key_ranges(mask, q, k, offset)
        return make_table_block_mask(mask, q, k, offset, device) if ranges is None else make_range_block_mask(ranges, k, device)


def make_table_block_mask(mask: Mask, q: int, k: int, offset: int | tuple[int, ...], device: torch.device) -> BlockMask | None:
    """Build the BlockMask of any mask, which reads tables of the blocks that the mask cuts.

    Return None if these tables would be larger than CUT_BYTES.
    """
    from torch.nn.attention.flex_attention import BlockMask

    batch = mask.batch if isinstance(offset, int) else len(offset)
    cut, full = [], []
    for start in range(0, q, BLOCK):
        rows = QueryBlock(start, min(start + BLOCK, q), *find_extremes(offset))
        possible, certain = list_touched_blocks(mask.find_possible_keys(rows, k)), list_covered_blocks(mask, rows, k)
        cut.append(sorted(possible - certain))
        full.append(sorted(possible & certain))
        if sum(map(len, cut)) * batch * mask.heads * BLOCK**2 > CUT_BYTES:
            return None
    tables = compute_tables(mask, cut, (batch, q, k), offset, device)
    number = torch.tensor(number_blocks(cut, full, -(-k // BLOCK)), device=device)  # of each block's table

    def can_see(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        row, head = broadcast_index(b, len(tables)), broadcast_index(h, len(tables[0]))
        is_visible: Tensor = tables[row, head, number[i // BLOCK, j // BLOCK], i % BLOCK, j % BLOCK]
        return is_visible

    return BlockMask.from_kv_blocks(
        *list_blocks(number[None] > 1, device),
        *list_blocks(number[None] == 1, device),
        BLOCK_SIZE=BLOCK,
        mask_mod=can_see,
        seq_lengths=(q, k),
    )


def find_extremes(offset: int | tuple[int, ...]) -> tuple[int, int]:
    """Return the least and the greatest offset of all batch rows."""
    return (offset, offset) if isinstance(offset, int) else (min(offset), max(offset))


def list_touched_blocks(keys: Spans) -> set[int]:
    """Return the blocks that hold any of some keys."""
    return {block for first, stop in keys for block in range(first // BLOCK, -(-stop // BLOCK))}


def list_covered_blocks(mask: Mask, rows: QueryBlock, k: int) -> set[int]:
    """Return the blocks of which all rows see every key; the last block may be shorter than the others."""
    spans = mask.find_certain_keys(rows, k)
    return {
        block for first, stop in spans for block in range(-(-first // BLOCK), -(-stop // BLOCK) if stop == k else stop // BLOCK)
    }


def number_blocks(cut: list[list[int]], full: list[list[int]], columns: int) -> list[list[int]]:
    """Return the number of each block's table: 0 if no query sees a key of it, 1 if all see it whole, else its own."""
    numbers, count = [], 2
    for partial, whole in zip(cut, full, strict=True):
        by_column = dict.fromkeys(whole, 1) | dict(zip(partial, itertools.count(count), strict=False))
        numbers.append([by_column.get(column, 0) for column in range(columns)])
        count += len(partial)
    return numbers


def compute_tables(
    mask: Mask, cut: list[list[int]], shape: tuple[int, int, int], offset: int | tuple[int, ...], device: torch.device
) -> Tensor:
    """Return the tables of the blocks that a mask cuts, in order, after that of an empty and that of a full block.

    The shape is (b, q, k); the tables are (b, h or 1, 2 + n, BLOCK, BLOCK).
    """
    batch, q, k = shape
    offsets = offset if isinstance(offset, int) else torch.tensor(offset, device=device)
    tables = torch.zeros(batch, mask.heads, 2 + sum(map(len, cut)), BLOCK, BLOCK, dtype=torch.bool, device=device)
    tables[:, :, 1], done = True, 2
    for r, columns in enumerate(cut):
        queries = torch.arange(r * BLOCK, (r + 1) * BLOCK, device=device).clamp(max=q - 1)
        starts = torch.tensor(columns, dtype=torch.long, device=device).unsqueeze(-1) * BLOCK
        keys = (starts + torch.arange(BLOCK, device=device)).flatten().clamp(max=k - 1)
        table = mask.block(queries, keys, offsets).expand(batch, mask.heads, BLOCK, len(keys))
        tables[:, :, done : done + len(columns)] = table.unflatten(-1, (len(columns), BLOCK)).transpose(2, 3)
        done += len(columns)
    return tables
