"""Inference of the rule, bias and softcap of flex_attention's elementwise functions, by evaluating them."""

import math
from collections.abc import Callable
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.mechanism.mask_algebra import EVERYTHING, Mask
from regard.mechanism.scores import score_dtype
from regard.observe.interception.forward_cache import cache_in_forward
from regard.observe.interception.plain_tensors import UnreadableError
from regard.observe.interception.thread_state import InterceptionPause
from regard.observe.stored_calls.mask_inference import ROWS, infer_table_rule

MOST_SEEN = 2**30  # entries of the table of a mask function
MOST_ADDED = 2**27  # entries of the bias of a score_mod
MOST_READ = 1000  # values read by a mask that are checked for changes
EMPTY = CellType()  # the cell of an unset variable
PLAIN = ("noop_mask", "_identity")  # torch's identity mask and score functions
LISTS, SIZES = slice(2, 6), slice(-3, -1)  # of a block mask as a tuple: its blocks and full blocks, and how large they are
OTHER_BLOCKS = "its block mask lists other blocks than its mask_mod allows, which a compiled kernel and another one differ in"
ScoreFunction = Callable[..., Tensor]  # mask_mod(b, h, q, k) or score_mod(score, b, h, q, k)
FlexRule = tuple[Mask, int, Tensor | None, float | None]  # rule, offset, bias, softcap


def infer_flex_rule(block_mask: Any, change: ScoreFunction | None, q: Tensor, k: Tensor) -> FlexRule:
    """Return the rule, offset, bias and softcap of a block mask and a score_mod, inferred once per forward for all layers."""
    if block_mask is not None and not isinstance(block_mask, tuple):
        block_mask = block_mask.as_tuple()  # as flex_attention makes it
    mask = None if block_mask is None else block_mask[-1]
    mask, change = (None if getattr(one, "__name__", "") in PLAIN else one for one in (mask, change))
    blocks = () if block_mask is None or has_one_block(block_mask, q, k) else block_mask
    if mask is None and change is None and not blocks:
        return EVERYTHING, 0, None, None
    captured_values = [*find_captured(mask, change), *(x for x in blocks[LISTS] if x is not None)]
    key = "flex", *map(id, captured_values), q.shape, k.shape[2], q.dtype

    def compute_rule() -> FlexRule:
        with InterceptionPause(), torch._C._EnableTorchFunction():
            rows = (1, 1) if block_mask is None else block_mask[2].shape[:2]
            table = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=q.device)
            table = table if mask is None else evaluate_mask(mask, rows, q, k)
            if blocks and lists_other_blocks(blocks, table.expand(-1, -1, q.shape[2], k.shape[2])):
                raise UnreadableError(OTHER_BLOCKS)
            return infer_uncached_rule(table, change, q, k)

    result: FlexRule = cache_in_forward(key, captured_values, compute_rule)
    return result


def has_one_block(block_mask: tuple[Any, ...], q: Tensor, k: Tensor) -> bool:
    """Return whether a block holds all queries and keys, as that of a call without a block mask."""
    rows, columns = block_mask[SIZES]
    return bool(rows >= q.shape[2] and columns >= k.shape[2])


def lists_other_blocks(block_mask: tuple[Any, ...], table: Tensor) -> bool:
    """Return whether a block mask leaves out a block in which its function, as a table (b, h, q, k), shows a key.

    Or whether it lists a block as full in which the function hides one. A compiled kernel goes by the lists, another one by the
    function alone.
    """
    (rows, columns), (q, k), lists = block_mask[SIZES], table.shape[2:], block_mask[LISTS]
    partial, full = (mark_blocks(lists[n], lists[n + 1], -(-q // rows), -(-k // columns)) for n in (0, 2))
    padded = [F.pad(table, (0, -k % columns, 0, -q % rows), value=one) for one in (False, True)]
    some, hidden = (x.unflatten(3, (-1, columns)).unflatten(2, (-1, rows)) for x in (padded[0], ~padded[1]))
    some, hidden = (x.any(5).any(3) for x in (some, hidden))
    return bool(((some & ~partial & ~full) | (hidden & full)).any())


def mark_blocks(counts: Tensor | None, indices: Tensor | None, rows: int, columns: int) -> Tensor:
    """Return which blocks (b, h, rows, columns) are listed: of each row the first `counts` of its `indices`; none without."""
    if counts is None or indices is None:
        return torch.zeros((), dtype=torch.bool)
    counts, indices = counts[:, :, :rows], indices[:, :, :rows].long()
    is_listed = torch.arange(indices.shape[3], device=indices.device) < counts.unsqueeze(-1)
    found = torch.zeros(*counts.shape, columns + 1, dtype=torch.bool, device=indices.device)
    return found.scatter_(3, indices.where(is_listed, columns).clamp(max=columns), True)[..., :columns]


def find_captured(*functions: Any) -> list[Any]:
    """Return functions and everything that they read: closures, defaults and globals, recursively.

    At most MOST_READ values are visited.
    """
    queue, values_by_id = list(functions), dict[int, Any]()
    while queue and len(values_by_id) < MOST_READ:
        value = queue.pop()
        if id(value) in values_by_id or isinstance(value, ModuleType | type):
            continue
        values_by_id[id(value)] = value
        if isinstance(value, FunctionType):
            queue += [cell.cell_contents for cell in value.__closure__ or () if cell != EMPTY]
            queue += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
            own = not value.__module__.startswith("torch.")
            queue += [value.__globals__[name] for name in value.__code__.co_names if own and name in value.__globals__]
        elif isinstance(value, MethodType):
            queue += [value.__func__, value.__self__]
        elif isinstance(value, partial):
            queue += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, tuple | list):
            queue += value
        elif isinstance(value, nn.Module):
            queue += [*value._parameters.values(), *value._buffers.values()]
        elif not isinstance(value, Tensor):
            queue += [x for x in getattr(value, "__dict__", {}).values() if isinstance(x, Tensor)]
    return list(values_by_id.values())


def infer_uncached_rule(table: Tensor, change: ScoreFunction | None, q: Tensor, k: Tensor) -> FlexRule:
    """Infer the rule, offset, bias and softcap. Raises UnreadableError where a map cannot express them."""
    softcap, bias = (None, None) if change is None else infer_softcap_and_bias(change, table, q, k)
    if bias is not None:
        is_hidden = bias == -torch.inf
        table, bias = table & ~is_hidden, bias.masked_fill(is_hidden, 0)
        bias = bias if bias.any() else None
    rule, offset = infer_table_rule(drop_equal_rows(table), q.shape[2], k.shape[2])
    return rule, offset, bias, softcap


def evaluate_mask(mask: ScoreFunction, rows: tuple[int, int], q: Tensor, k: Tensor) -> Tensor:
    """Return the bool table of a mask function, evaluated in blocks of queries.

    `rows` are the numbers of batch rows and heads that it distinguishes. Raises UnreadableError past MOST_SEEN entries.
    """
    from torch.nn.attention.flex_attention import create_mask

    if math.prod((*rows, q.shape[2], k.shape[2])) > MOST_SEEN:
        raise UnreadableError(f"its block mask for {q.shape[2]:,} queries is too large for a dense table")
    parts = []
    for start in range(0, q.shape[2], ROWS):
        count = min(ROWS, q.shape[2] - start)
        parts.append(
            drop_equal_rows(
                create_mask(offset_queries(mask, start), rows[0], rows[1], count, k.shape[2], device=q.device).bool()
            )
        )
    size = [max(part.shape[axis] for part in parts) for axis in (0, 1)]
    return torch.cat([part.expand(*size, -1, -1) for part in parts], 2)


def offset_queries(function: ScoreFunction, start: int) -> ScoreFunction:
    """Return a function of batch, head, query and key whose queries are counted from `start`."""

    def call_with_offset(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return function(b, h, i + start, j)

    return call_with_offset


def drop_equal_rows(x: Tensor) -> Tensor:
    """Return a table reduced to one batch row if all are equal, and to one head if all are equal."""
    for axis in (0, 1):
        first_entry = x.narrow(axis, 0, 1)
        x = first_entry if (x == first_entry).all() else x
    return x


def infer_softcap_and_bias(change: ScoreFunction, table: Tensor, q: Tensor, k: Tensor) -> tuple[float | None, Tensor]:
    """Infer the softcap and bias of a score_mod: change(s) = softcap tanh(s / softcap) + bias, with or without the softcap.

    Raises UnreadableError where it has no such form, or its bias has more than MOST_ADDED entries.
    """
    shape = *q.shape[:3], k.shape[2]
    exact: dict[str, Any] = {"dtype": score_dtype(q.dtype), "device": q.device}  # as flex_attention computes scores
    if math.prod(shape) > MOST_ADDED:
        raise UnreadableError(f"its score_mod for {shape[2]:,} queries is too large for a dense table")
    bias = evaluate_score_mod(change, torch.zeros(shape, **exact))
    is_visible = (table & (bias != -torch.inf)).expand(shape)
    rise = (evaluate_score_mod(change, torch.full(shape, 1e9, **exact)) - bias)[is_visible]
    softcap = float(rise.max()) if len(rise) and float(rise.max()) < 1e8 else None
    scores = torch.linspace(-40, 40, bias[0].numel(), **exact).roll(7).view(shape[1:]).expand(shape)
    expected_scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    difference = (evaluate_score_mod(change, scores) - bias - expected_scores)[is_visible].abs()
    if (softcap is not None and softcap <= 0) or not bool((difference < 1e-3).all()):
        raise UnreadableError("its score_mod does more than apply a softcap and add a bias, which is all that a map supports")
    return softcap, drop_equal_rows(bias)


def evaluate_score_mod(change: ScoreFunction, scores: Tensor) -> Tensor:
    """Evaluate a score_mod on all scores (b, h, q, k)."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    for axis in (4, 3, 2, 1):
        change = torch.vmap(change, in_dims=(0, *(0 if one == axis else None for one in (1, 2, 3, 4))))
    with TransformGetItemToIndex():
        return change(scores, *(torch.arange(n, device=scores.device) for n in scores.shape)).to(scores.dtype)
