"""Maps of queries and keys that an inference engine with a paged cache was made to dump, as vLLM stores them."""

from typing import Any

import torch
from torch import Tensor

from regard.errors import ConfigError, OutOfRangeError, ShapeError
from regard.map.attention_map import AttentionMap
from regard.mechanism.arguments import check_choice, check_floating, describe_value
from regard.mechanism.mask_algebra import Mask, check_mask
from regard.mechanism.masks import Causal

LAYOUTS = ("NHD", "HND")  # of a page: tokens before heads, as FlashAttention's, or heads before tokens, as FlashInfer's
INTEGERS = (torch.int32, torch.int64)
CAUSAL = Causal()


def load_paged_maps(
    q: Tensor,
    pages: Tensor,
    block_tables: Tensor,
    lengths: Tensor,
    query_starts: Tensor | None = None,
    mask: Mask = CAUSAL,
    *,
    layout: str = "NHD",
    **scores: Any,
) -> list[AttentionMap]:
    """Return the map (1, h, q, k) of each sequence of a batch whose keys are in pages.

    The arguments are those of vLLM's attention backends for one layer: q (tokens, h, d) of all sequences, one after another;
    pages, the key cache, (blocks, size, g, d), or (blocks, g, size, d) with layout="HND", or (blocks, g, d / x, size, x), the
    older one; block_tables (n, most blocks), the blocks of each sequence in order; lengths (n,), its keys; query_starts
    (n + 1,), `query_start_loc` there, where its queries begin and the last one ends: one query each by default, as in decoding.
    The queries are the last tokens of their sequence. `scores` are scale, softcap, bias and sinks of AttentionMap.
    Pages in 8 bits must be converted before. Raises ShapeError and OutOfRangeError for arguments that do not fit together.
    """
    check_floating("q", q)
    pages = order_axes(check_floating("pages", pages), layout)
    for name, x in (("block_tables", block_tables), ("lengths", lengths), ("query_starts", query_starts)):
        if x is not None or name != "query_starts":
            check_whole_numbers(name, x)
    check_mask(mask)
    blocks, size = pages.shape[:2]
    if query_starts is None:
        query_starts = torch.arange(lengths.numel() + 1)
    check_batch(q, pages, block_tables, lengths, query_starts)
    maps = []
    for row, (length, start, stop) in enumerate(
        zip(lengths.tolist(), query_starts[:-1].tolist(), query_starts[1:].tolist(), strict=True)
    ):
        table = block_tables[row, : -(-length // size)].to(pages.device, torch.long)
        if not stop - start <= length <= size * len(table) or not 0 <= start <= stop <= len(q):
            raise ShapeError(
                f"sequence {row} has {stop - start} queries and {length} keys, in {len(table)} blocks of {size}; its queries "
                f"are its last tokens, from query {start} of {len(q)}."
            )
        if length and not 0 <= int(table.min()) <= int(table.max()) < blocks:
            raise OutOfRangeError(f"the blocks of sequence {row} must be from 0 to {blocks - 1}; got {table.tolist()}.")
        k = pages[table].flatten(0, 1)[:length]
        queries, keys = (x.transpose(0, 1)[None] for x in (q[start:stop], k))
        maps.append(AttentionMap(queries, keys, mask, offset=length - stop + start, **scores))
    return maps


def check_whole_numbers(name: str, x: object) -> None:
    """Raise ConfigError for anything but a dense tensor of int32 or int64."""
    if not isinstance(x, Tensor) or x.dtype not in INTEGERS or x.layout is not torch.strided or x.is_nested:
        raise ConfigError(f"{name} must be a dense tensor of int32 or int64; got {describe_value(x)}.")


def order_axes(pages: Tensor, layout: str) -> Tensor:
    """Return pages as (blocks, size, g, d)."""
    check_choice("layout", layout, LAYOUTS)
    if pages.dim() == 5:
        return pages.permute(0, 3, 1, 2, 4).flatten(3)
    if pages.dim() != 4:
        raise ShapeError(f"pages must be (blocks, size, g, d) or (blocks, g, d / x, size, x); got {tuple(pages.shape)}.")
    return pages if layout == "NHD" else pages.transpose(1, 2)


def check_batch(q: Tensor, pages: Tensor, block_tables: Tensor, lengths: Tensor, query_starts: Tensor) -> None:
    """Raise ShapeError if the tensors of a batch do not fit together."""
    if q.dim() != 3 or q.shape[2] != pages.shape[3] or q.shape[1] % pages.shape[2]:
        raise ShapeError(
            f"q must be (tokens, h, d), with the d of the pages and a multiple of their heads; got {tuple(q.shape)} beside "
            f"pages (blocks, size, g, d) = {tuple(pages.shape)}."
        )
    n = lengths.numel()
    if lengths.dim() != 1 or block_tables.dim() != 2 or len(block_tables) != n or query_starts.shape != (n + 1,):
        raise ShapeError(
            "lengths (n,), block_tables (n, blocks) and query_starts (n + 1,) must be of the same n; got "
            f"{tuple(lengths.shape)}, {tuple(block_tables.shape)} and {describe_value(tuple(query_starts.shape))}."
        )
