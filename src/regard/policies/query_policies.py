"""Policies that choose keys for each query, or each block of queries: Oracle, Quest, BlockSparse and VerticalSlash."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.compiled import processor
from regard.compiled.threads import run_parts
from regard.errors import ConfigError
from regard.map.pass_inputs import pack_panels
from regard.map.plane import BLOCK_NUMBERS
from regard.mechanism.arguments import check_count
from regard.mechanism.heads import share
from regard.mechanism.mask_algebra import EVERYTHING, Mask
from regard.mechanism.scores import default_scale, score_dtype
from regard.policies.attention_inputs import AttentionInputs
from regard.policies.budget import count_keys
from regard.policies.key_masks import ChosenPages, Lines
from regard.policies.policy import BudgetPolicy, Policy, require_prompt

ROWS = 64  # queries that a thread takes at a time


@dataclass(frozen=True)
class Oracle(BudgetPolicy):
    """Read the `budget` keys with the largest weights, at each query after the prompt.

    No choice of as many keys keeps more of the weights, and none this good is known before all weights are: it is the bound
    that other policies are compared with.
    """

    reads_whole_prompt: ClassVar[bool] = True

    def choose_keys(self, inputs: AttentionInputs) -> Mask:
        require_prompt(self, inputs, 0)
        if inputs.prompt == inputs.tokens:
            return EVERYTHING
        counts = count_keys(self.budget, inputs.prompt, inputs.layer, inputs.k.shape[1]).repeat_interleave(inputs.heads_per_key)
        amounts = counts.clamp(max=inputs.tokens).tolist()
        found = [find_largest_keys(inputs, head, count) for head, count in enumerate(amounts)]
        width = max(keys.shape[-1] for keys in found)
        pages = torch.cat([repeat_last(keys, width) for keys in found], 1)
        return ChosenPages(pages, page=1, rows=1, start=inputs.prompt, stop=inputs.tokens)


def find_largest_keys(inputs: AttentionInputs, head: int, count: int) -> Tensor:
    """Return the `count` keys with the largest weights of each query after the prompt in one head, int32 (b, 1, n, count).

    They are in no order. Where a query sees fewer, keys that it does not see, or one that it sees again, fill the row.
    """
    q, k = inputs.q[:, head], inputs.k[:, head // inputs.heads_per_key]
    is_plain = inputs.bias is None and q.device.type == "cpu" and score_dtype(q.dtype) == torch.float32
    if not (is_plain and processor.has_numba() and q.shape[2] and q.isfinite().all() and k.isfinite().all()):
        return inputs.build_map(inputs.prompt).select(heads=[head]).top(count)[1].int()
    scale = default_scale(q) if inputs.scale is None else inputs.scale
    rows = [run_largest_keys_pass(inputs, x.float() * scale, y.float(), count) for x, y in zip(q, k, strict=True)]
    return torch.stack(rows).unsqueeze(1)


def run_largest_keys_pass(inputs: AttentionInputs, q: Tensor, k: Tensor, count: int) -> Tensor:
    """Return the keys (n, count) of one matrix, of queries q (t, d), scaled, and keys k (t, d), by the compiled pass."""
    from regard.policies import numba_largest_keys

    t, prompt, threads = inputs.tokens, inputs.prompt, torch.get_num_threads()
    lows, stops = inputs.find_key_ranges()
    queries, panels, found = q.contiguous().numpy(), pack_panels(k.T.numpy()), np.zeros((t - prompt, count), np.int32)

    def work(n: int) -> None:
        for first in range(prompt + n * ROWS, t, threads * ROWS):
            bounds = lows, stops, prompt, first, min(first + ROWS, t)
            numba_largest_keys.find_largest_keys(queries, panels, *bounds, found)

    run_parts(work, threads)
    return torch.from_numpy(found)


def repeat_last(keys: Tensor, width: int) -> Tensor:
    """Repeat the last of some keys (..., n), so that there are `width`."""
    return torch.cat([keys, keys[..., -1:].expand(*keys.shape[:-1], width - keys.shape[-1])], -1)


@dataclass(frozen=True)
class Quest(BudgetPolicy):
    """Read the pages of keys that may hold the largest scores, at each query after the prompt, and the page of its own key.

    A page of `page` keys is represented by the smallest and the largest number of each feature; the score of a query with them
    bounds that with every key of the page. budget counts keys. Source: Tang et al. 2024 (Quest), algorithm 1.
    """

    page: int = 16
    reads_whole_prompt: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("Quest(page)", self.page)

    def choose_keys(self, inputs: AttentionInputs) -> Mask:
        require_prompt(self, inputs, 0)
        if inputs.prompt == inputs.tokens:
            return EVERYTHING
        count = count_pages(self, inputs, "page", self.page)
        dtype = score_dtype(inputs.q.dtype)
        whole = inputs.tokens // self.page  # the pages that are ever complete
        pages = inputs.k[:, :, : whole * self.page].to(dtype).unflatten(2, (whole, self.page))
        low, high = (share(x, inputs.q.shape[1]) for x in (pages.amin(3), pages.amax(3)))  # (b, h, pages, d)
        q = inputs.q[:, :, inputs.prompt :].to(dtype) * (-1 if (inputs.scale or 1) < 0 else 1)
        step = max(1, BLOCK_NUMBERS // max(1, whole * q.shape[0] * q.shape[1]))
        found = []
        for start in range(0, q.shape[2], step):
            part = q[:, :, start : start + step]
            bounds = part.clamp(min=0) @ high.mT + part.clamp(max=0) @ low.mT  # (b, h, n, pages)
            own = torch.arange(inputs.prompt + start, inputs.prompt + start + part.shape[2], device=q.device) // self.page
            found.append(choose_largest_pages(bounds, own, count))
        return ChosenPages(torch.cat(found, 2), page=self.page, rows=1, start=inputs.prompt, stop=inputs.tokens)


@dataclass(frozen=True)
class BlockSparse(BudgetPolicy):
    """Read, for each block of queries, the blocks of keys whose mean has the largest score with the mean of the queries.

    This holds for the prompt, whose queries are known at once; later queries read every key. A block of queries always reads
    its own block of keys. budget counts keys. Source: Jiang et al. 2024 (MInference), the block-sparse pattern of algorithm 3.
    """

    block: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("BlockSparse(block)", self.block)

    def choose_keys(self, inputs: AttentionInputs) -> Mask:
        require_prompt(self, inputs, 1)
        prompt, dtype = inputs.select_prompt(), score_dtype(inputs.q.dtype)
        count = count_pages(self, inputs, "block", self.block)
        q, k = (average_blocks(x.to(dtype), self.block) for x in (prompt.q, prompt.k))
        scores = q @ share(k, q.shape[1]).mT * (-1 if (inputs.scale or 1) < 0 else 1)  # (b, h, blocks, blocks)
        pages = choose_largest_pages(scores, torch.arange(q.shape[2], device=q.device), count)
        return ChosenPages(pages, page=self.block, rows=self.block, start=0, stop=inputs.prompt)


def count_pages(policy: BudgetPolicy, inputs: AttentionInputs, name: str, size: int) -> int:
    """Return how many pages, or blocks, of keys a budget is. Raises ConfigError for none, or another number in some heads."""
    counts = count_keys(policy.budget, inputs.prompt, inputs.layer, inputs.k.shape[1])
    if int(counts.min()) < size:
        raise ConfigError(
            f"{policy.label} reads {int(counts.min()):,} keys for a prompt of {inputs.prompt:,}, not one {name} of {size:,}: "
            f"pass a larger budget or a smaller {name}."
        )
    if len(set((counts // size).tolist())) > 1:
        raise ConfigError(f"{policy.label} reads as many keys in each head of a layer: pass one budget for each layer.")
    return int(counts[0]) // size


def average_blocks(x: Tensor, block: int) -> Tensor:
    """Average x (b, h, t, d) over blocks of tokens, (b, h, blocks, d); the last block may have fewer."""
    blocks = -(-x.shape[2] // block)
    padded = F.pad(x, (0, 0, 0, blocks * block - x.shape[2]))
    total = padded.view(*x.shape[:2], blocks, block, x.shape[3]).sum(3)
    sizes = (x.shape[2] - torch.arange(blocks, device=x.device) * block).clamp(max=block)
    return total / sizes.unsqueeze(-1)


def choose_largest_pages(scores: Tensor, own: Tensor, count: int) -> Tensor:
    """Choose `count` pages for each line of scores (b, h, n, pages): its own page (n,), and the largest scores before it.

    Where there are fewer pages before, the own page stands in their place. int32, (b, h, n, count).
    """
    b, h, n, width = scores.shape
    last = own.view(1, 1, n, 1).expand(b, h, n, 1)
    if count == 1 or not width:
        return last.int()
    hidden = torch.arange(width, device=scores.device) >= own.unsqueeze(-1)  # (n, pages)
    best = scores.masked_fill(hidden, -torch.inf).topk(min(count - 1, width))
    return torch.cat([torch.where(best.values == -torch.inf, last, best.indices), last], -1).int()


@dataclass(frozen=True)
class VerticalSlash(Policy):
    """Read, in the prompt, the `vertical` columns and the `slash` diagonals to which its last queries attend most.

    The weights of the `last` queries of the prompt are summed over each key, and over each distance of query and key. A query
    always reads its own key; queries after the prompt read every key. Source: Jiang et al. 2024 (MInference), algorithm 2.
    """

    vertical: int = 256
    slash: int = 256
    last: int = 64

    def __post_init__(self) -> None:
        for name in ("vertical", "slash", "last"):
            check_count(f"VerticalSlash({name})", getattr(self, name))

    def choose_keys(self, inputs: AttentionInputs) -> Mask:
        require_prompt(self, inputs, self.last, ", or a smaller last")
        prompt = inputs.select_prompt()
        first = prompt.tokens - self.last
        weights = prompt.build_map(first)[...]  # (b, h, last, prompt)
        rows = torch.arange(first, prompt.tokens, device=weights.device).view(-1, 1)
        back = (rows - torch.arange(prompt.tokens, device=weights.device)).clamp(min=0).expand_as(weights)
        by_distance = weights.new_zeros(*weights.shape[:2], prompt.tokens)
        by_distance.scatter_add_(2, back.flatten(2), weights.flatten(2))  # keys after their query have weight 0
        by_distance[:, :, 0] = torch.inf
        columns = mark_largest(weights.sum(2), self.vertical, inputs.tokens)
        return Lines(columns, mark_largest(by_distance, self.slash, inputs.tokens), inputs.prompt)


def mark_largest(x: Tensor, n: int, size: int) -> Tensor:
    """Mark the n largest numbers of x (b, h, t), as a bool (b, h, size) whose rest is False."""
    found = torch.zeros(*x.shape[:2], size, dtype=torch.bool, device=x.device)
    return found.scatter_(2, x.topk(min(n, x.shape[2])).indices, True)
