"""The call that blocks of queries and keys in a loop amount to, whose context is compared with what the model made of them."""

import itertools
from dataclasses import replace

import torch
from torch import Tensor

from regard.map.small_maps import weigh_scores
from regard.mechanism.heads import share
from regard.observe.interception.attention_call import AttentionCall
from regard.observe.interception.handwritten.scores.row_comparison import OUTPUT_ROUNDINGS, compute_scores, find_hidden_keys
from regard.observe.interception.handwritten.scores.score_formula import describe_bias
from regard.observe.interception.handwritten.scores.score_parts import ScoreParts, bound_products, infer_rule_of_parts
from regard.observe.interception.handwritten.softmax.key_blocks import OTHERWISE, KeyBlock, QueryRows, find_place
from regard.observe.interception.handwritten.softmax.undivided_contexts import DIVIDED, NEAR, NEARLY
from regard.observe.interception.plain_tensors import UnreadableError

UNORDERED = "it adds up blocks of {} in a loop, whose order among the tokens is not known"
UNEQUAL = "it adds up blocks of keys in a loop, whose scores have different scales, or that occur twice"
LARGE = "it adds up blocks of keys in a loop, whose mask or bias would take {:,} bytes"
MOST_ENTRIES = 2**28  # of a table of all queries and keys
HALF = 1e-4  # below the rounding of numbers of 16 bits


def order_blocks(tensors: list[Tensor], sizes: list[int], readings: list[list[int]], name: str, is_cut: bool) -> list[int]:
    """Return the order of blocks of tokens, by their places in the tensor that they are parts of, else as they were read.

    `readings` has the numbers of blocks in the order in which each block of the others read them, and `is_cut` is whether they
    were cut out of all tokens before a layer projected them. Raises UnreadableError if the order is not known.
    """
    places = [find_place(x) for x in tensors]
    numbers = [*range(len(places))]
    if len({one.storage for one in places}) == 1:
        order = sorted(numbers, key=lambda n: places[n].offset)
        steps = {(places[m].offset - places[n].offset) / sizes[n] for n, m in itertools.pairwise(order)}
        if len(steps) > 1 or not steps <= {*places[0].strides}:
            raise UnreadableError(UNORDERED.format(name))
        return order
    if is_cut or any(one != sorted(one) for one in readings):
        raise UnreadableError(UNORDERED.format(name))
    return numbers


def join_blocks(component: list[QueryRows]) -> AttentionCall:
    """Return the call that blocks of queries and keys amount to.

    Raises UnreadableError if the order of the blocks is not known, or if the model's output is not that of the call.
    """
    keys = {find_place(block.keys): block for rows in component for block in rows.blocks}
    numbers = {place: n for n, place in enumerate(keys)}
    readings = [[numbers[find_place(block.keys)] for block in rows.blocks] for rows in component]
    columns = [*keys.values()]
    blocks = [block for rows in component for block in rows.blocks]
    first = blocks[0].call
    is_one = all(one.call.scale == first.scale and one.call.softcap == first.softcap for one in blocks)
    if not is_one or any(len(set(one)) < len(one) for one in readings):
        raise UnreadableError(UNEQUAL)
    is_cut = any(one.is_projected_alone for one in blocks)
    of_keys = order_blocks([one.keys for one in columns], [one.call.k.shape[2] for one in columns], readings, "keys", is_cut)
    queries, sizes = [one.query for one in component], [rows.blocks[0].call.q.shape[2] for rows in component]
    are_tokens = all(one.has_picked_query for one in blocks)
    are_tokens |= max(sizes) > 1 and all(one.has_part_of_queries for one in blocks)
    if len(queries) > 1 and not are_tokens:
        raise UnreadableError(UNORDERED.format("queries"))  # they may be heads or samples that share their keys
    of_queries = order_blocks(queries, sizes, [], "queries", is_cut)
    grid = [[find_pair(component[i], columns[j]) for j in of_keys] for i in of_queries]
    q = torch.cat([component[i].blocks[0].call.q.detach() for i in of_queries], 2)
    k = torch.cat([columns[j].call.k.detach() for j in of_keys], 2)
    v = torch.cat([columns[j].call.v.detach() for j in of_keys], 2)  # type: ignore[union-attr]
    counts = [component[i].blocks[0].call.q.shape[2] for i in of_queries], [columns[j].call.k.shape[2] for j in of_keys]
    parts = ScoreParts(scale=1.0 if first.scale is None else first.scale, softcap=first.softcap)
    if any(one.bias is not None for one in blocks):
        parts.biases = [join_tables([[one and one.bias for one in row] for row in grid], *counts, blocks, 0.0)]
    if any(one is None or one.hidden is not None for row in grid for one in row):
        tables = [[torch.ones(1, 1, 1, 1).bool() if one is None else one.hidden for one in row] for row in grid]
        parts.hidden, parts.places = [(join_tables(tables, *counts, blocks, False), -torch.inf)], [len(parts.biases)]
    parts.raw = [*parts.biases, *(table for table, _ in parts.hidden)]
    (mask, offset, bias), depends = infer_rule_of_parts(parts, q, k)
    call = replace(
        first, q=q, k=k, v=v, mask=mask, offset=offset, bias=bias, mask_depends_on_scores=depends, note=describe_bias(bias)
    )
    starts = [sum(counts[0][:n]) for n in range(len(of_queries))]
    factor = max(compare_context(call, component[i], start, len(of_keys)) for i, start in zip(of_queries, starts, strict=True))
    return replace(call, note="; ".join(filter(None, (call.note, NEARLY.format(factor) if factor else ""))))


def find_pair(rows: QueryRows, column: KeyBlock) -> KeyBlock | None:
    """Return the block of some queries and of the keys of another block; None if the queries do not see them."""
    place = find_place(column.keys)
    return next((one for one in rows.blocks if find_place(one.keys) == place), None)


def join_tables(
    tables: list[list[Tensor | None]], rows: list[int], columns: list[int], blocks: list[KeyBlock], default: float | bool
) -> Tensor:
    """Return a table (b, h, q, k) of tables of blocks, which may have size 1 along any axis; None is the default."""
    known = [one for row in tables for one in row if one is not None]
    lead = torch.broadcast_shapes(*(one.shape[:2] for one in known))
    kind, device = known[0].dtype, blocks[0].call.q.device
    count = lead.numel() * sum(rows) * sum(columns)
    if count > MOST_ENTRIES:
        raise UnreadableError(LARGE.format(count * kind.itemsize))

    def expand(one: Tensor | None, n: int, m: int) -> Tensor:
        one = torch.full((1, 1, 1, 1), default, dtype=kind) if one is None else one
        return one.to(device).expand(*lead, n, m)

    lines = [
        torch.cat([expand(one, n, m) for one, m in zip(row, columns, strict=True)], 3)
        for row, n in zip(tables, rows, strict=True)
    ]
    return torch.cat(lines, 2)


def compare_context(call: AttentionCall, rows: QueryRows, start: int, count: int) -> float:
    """Compare sampled rows of a call's context with what the model made of a block of queries, from `start`.

    Return how far the model divides a row by another number than the sum of its weights, 0 up to rounding. Raises
    UnreadableError if none of the model's tensors is the context, of so many blocks of keys.
    """
    assert call.v is not None
    index = rows.sampled + start
    q, k = call.q[:, :, index], call.k
    bias = call.bias if call.bias is None or call.bias.shape[2] == 1 else call.bias.index_select(2, index)
    scores = compute_scores(call, q, k, bias, find_hidden_keys(call, index))
    weights = weigh_scores(scores.flatten(0, 1).clone(), None).view(scores.shape).double()
    v = share(call.v, q.shape[1]).double()
    context, size = weights @ v, weights @ v.abs()
    eps = max(torch.finfo(x.dtype).eps for x in (q, rows.samples[-1]))
    bound = bound_products(q, k, 1.0 if call.scale is None else call.scale)
    tolerance = eps * (OUTPUT_ROUNDINGS + 4 * (count + bound + q.shape[-1])) * size
    along = torch.full_like(context[..., 0], torch.inf)  # how far a row of x may be in the direction of the context
    if eps > HALF:  # dot products are summed in float32; each score and each sum is rounded, to either side
        sizes = scores.double().abs().masked_fill(weights == 0, 0) + bound * q.shape[-1] ** -0.5
        of_scores, of_sums = (weights * sizes) @ v.abs(), 4 + count**0.5
        tolerance = 2 * eps * (2 * of_sums * size + of_scores)
        square = context.square().sum(-1)
        of_weights = weights * sizes * (context @ v.mT - square.unsqueeze(-1))  # a weight that is off takes from all others
        merges_by_logarithms = all(one.is_divided for one in rows.blocks)
        of_logarithms = count**0.5 * scores.double().logsumexp(-1).abs() if merges_by_logarithms else 0
        along = eps * ((of_sums + of_logarithms) * square + 4 * of_weights.norm(dim=-1))
    for sample in reversed(rows.samples):
        x = sample.double()
        difference = x - context
        off = (difference * context).sum(-1)  # of each row, independent of that of the others
        is_near = bool((off.abs() <= along).all() and off.sum().abs() <= along.norm())
        if is_near and bool((difference.abs() <= tolerance).all()):
            return 0.0
    for sample in reversed(rows.samples):
        x = sample.double()
        factor = (x * context).sum(-1, keepdim=True) / context.square().sum(-1, keepdim=True)
        distance = float((factor - 1).abs().nan_to_num(torch.inf).amax())
        if distance < NEAR and bool(((x - factor * context).abs() <= tolerance).all()):
            return distance
    raise UnreadableError(OTHERWISE)


def read_calls(component: list[QueryRows]) -> list[AttentionCall]:
    """Return the call that blocks amount to, or where it is not known and none needs another, one for each.

    Raises UnreadableError if blocks were shifted by a running maximum, or are of one key, and their call is not known.
    """
    blocks = [block for rows in component for block in rows.blocks]
    try:
        return [join_blocks(component)]
    except UnreadableError:
        if len(blocks) == 1 and blocks[0].is_of_one_key:
            return []  # a product that is not added to others
        if any(one.needs_others for one in blocks):
            raise
        return [
            one.call if one.is_divided else replace(one.call, note="; ".join(filter(None, (one.call.note, DIVIDED))))
            for one in blocks
        ]
