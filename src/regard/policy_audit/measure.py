"""What policies drop, for every row of a layer, without storing a matrix.

Of the complete attention one traversal gives every row's denominator and output. A policy that ends keys, as a cache does, is
measured by the compiled passes of `kept_rows.py`, one that chooses pages, or columns and diagonals, by those of
`chosen_rows.py`. Any other one, and any dtype and device, is measured by blocks of queries with only the keys that any of them
may use: this is the definition.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from regard.errors import ConfigError
from regard.map import pass_runner, passes
from regard.map.passes import AppliedWeights
from regard.map.plane import BLOCK_NUMBERS, Plane, exponentiate_rows, multiply_exactly
from regard.mechanism import spans
from regard.mechanism.mask_algebra import EVERYTHING, Mask, check_mask
from regard.policies import AttentionInputs, ChosenPages, Lines, Policy
from regard.policy_audit import chosen_rows, kept_rows
from regard.policy_audit.row_measures import LEAST_DROPPED, RowMeasures

ROWS = 256  # queries of a block


def measure_layer(inputs: AttentionInputs, policies: Sequence[Policy]) -> tuple[RowMeasures, list[Mask]]:
    """Measure every row of a layer under some policies, and return their masks as well.

    Raises ConfigError where a policy keeps no key.
    """
    values, planes = inputs.require_values("an audit"), list(inputs.build_map().planes)
    is_compiled = kept_rows.can_run_compiled(inputs, values)
    complete = compute_complete_rows(inputs, values, planes) if is_compiled else {}
    if len(complete) == len(planes) and inputs.sinks is None:
        sums = torch.stack([complete[plane].sums for plane in planes])
        inputs = replace(inputs, weight_sums=sums.view(*inputs.q.shape[:2], inputs.prompt))
    masks = [check_mask(policy.choose_keys(inputs)) for policy in policies]
    found = RowMeasures.measure_complete_rows(inputs, len(policies))
    ends = [kept_rows.find_ends(inputs, mask) for mask in (*masks, EVERYTHING)] if is_compiled else []

    def measure_head(plane: Plane, threads: int) -> None:
        v, own = select_values(inputs, values, plane), complete.get(plane)
        others: Sequence[int] = range(len(masks))
        if own is not None:
            cache = kept_rows.HeadCache(plane, v)
            kept_rows.measure_head(plane, cache, inputs.prompt, own, ends, found, threads)
            chosen_rows.measure_head(plane, cache, inputs, masks, own, found, threads)
            others = [n for n in others if ends[n] is None and not isinstance(masks[n], ChosenPages | Lines)]
        if others:
            applied = passes.apply_weights_with_statistics(plane, v) if own is None else own.rows.to_applied()
            for n in others:
                for start in range(0, plane.shape[0], ROWS):
                    rows = slice(start, min(start + ROWS, plane.shape[0]))
                    measure_block(plane, applied, v, masks[n].select_heads([plane.h]), rows, found, n)

    if is_compiled:
        pass_runner.run_planes(planes, measure_head)
    else:
        for plane in planes:
            measure_head(plane, 1)
    for n, policy in enumerate(policies):
        changed = change_cache(policy, inputs, masks[n])
        if changed is not None:
            measure_changed_cache(inputs, changed, found, n)
    return found, masks


def change_inputs(policy: Policy, inputs: AttentionInputs) -> tuple[Mask, AttentionInputs | None]:
    """Return the mask that a policy chooses, and what later queries read if it changes the cache, else None."""
    mask = policy.choose_keys(inputs)
    return mask, change_cache(policy, inputs, mask)


def change_cache(policy: Policy, inputs: AttentionInputs, mask: Mask) -> AttentionInputs | None:
    """Return what queries after the prompt read under the mask of a policy that changes the cache; None if it does not."""
    cache = policy.change_cache(inputs)
    if cache is None:
        return None
    return replace(inputs, q=inputs.q.to(cache[0].dtype), k=cache[0], v=cache[1], mask=inputs.mask & mask)


def compute_dropped_weights(
    inputs: AttentionInputs, mask: Mask, changed: AttentionInputs | None, b: int, h: int, query: int
) -> Tensor:
    """Return how much of each weight of a row a policy drops, (t,): all of a dropped key's, else by how much it falls."""
    weights = inputs.build_map()[b, h, query]
    if changed is not None and query >= inputs.prompt:
        return (weights - changed.build_map()[b, h, query]).clamp(min=0)
    keys = torch.arange(inputs.tokens, device=weights.device)
    at_b, at_h, at_query = (torch.tensor(place, device=weights.device) for place in (b, h, query))
    return weights.masked_fill(mask.can_see(at_b, at_h, at_query, keys), 0)


def select_values(inputs: AttentionInputs, values: Tensor, plane: Plane) -> Tensor:
    """Return the values (t, e) of a head, from those of the key heads."""
    return values[plane.b, plane.h // inputs.heads_per_key]


def compute_complete_rows(
    inputs: AttentionInputs, values: Tensor, planes: Sequence[Plane]
) -> dict[Plane, kept_rows.CompleteRows]:
    """Compute the complete rows of all heads by compiled passes, but for those with a NaN."""

    def compute(plane: Plane, threads: int) -> kept_rows.CompleteRows | None:
        return kept_rows.CompleteRows.compute(plane, select_values(inputs, values, plane), inputs.prompt, threads)

    found = zip(planes, pass_runner.run_planes(planes, compute), strict=True)
    return {plane: rows for plane, rows in found if rows is not None}


def measure_changed_cache(inputs: AttentionInputs, changed_inputs: AttentionInputs, found: RowMeasures, policy: int) -> None:
    """Measure the rows after the prompt whose queries read other keys and values.

    recall is what the two distributions have in common, Σ min(p, p'), which for dropped keys is the share that is kept.
    """
    first, values, v = inputs.prompt, inputs.require_values("an audit"), changed_inputs.require_values("an audit")
    maps = [one.build_map(first) for one in (inputs, changed_inputs)]
    for plane, other in zip(*(one.planes for one in maps), strict=True):
        group = plane.h // inputs.heads_per_key
        for start, stop, ranges in plane.iterate_run_bounds():
            columns = plane.list_columns(ranges)
            rows = (one.compute_masked_rows(start, stop, ranges) for one in (plane, other))
            logs, changed_logs = (compute_log_weights(scores, plane.sink) for scores in rows)
            weights, changed = logs.exp(), changed_logs.exp()
            divergence = changed * (changed_logs - logs).masked_fill(changed == 0, 0)
            context = multiply_exactly(weights[:, : len(columns)], values[plane.b, group, columns])
            change = multiply_exactly(changed[:, : len(columns)], v[plane.b, group, columns]) - context
            size, error = context.norm(dim=-1), change.norm(dim=-1)
            place = (policy, plane.b, plane.h, slice(first + start, first + stop))
            found.kl[place] = divergence.sum(-1).clamp(min=0)
            found.recall[place] = torch.minimum(weights, changed).sum(-1).clamp(max=1)
            found.output_error[place] = torch.where(size > 0, error / size, error)


def compute_log_weights(scores: Tensor, sink: Tensor | None) -> Tensor:
    """Compute the logarithms of the weights of scores (n, m), and of the sink in a last column if there is one."""
    if sink is not None:
        scores = torch.cat([scores, sink.expand(len(scores), 1)], -1)
    return scores.log_softmax(-1)


def measure_block(
    plane: Plane, complete: AppliedWeights, v: Tensor, mask: Mask, rows: slice, found: RowMeasures, policy: int
) -> None:
    """Measure a block of rows of one matrix under the mask of a policy, and write what it keeps to `found`."""
    block, keys = plane.make_query_block(rows.start, rows.stop), plane.shape[1]
    seen = plane.request.mask.find_possible_keys(block, keys)
    if spans.is_superset(mask.find_certain_keys(block, keys), seen):
        return  # the policy drops nothing here
    columns = plane.list_columns(spans.intersection(mask.find_possible_keys(block, keys), seen))
    step = max(1, BLOCK_NUMBERS // max(len(columns), 1))
    for start in range(rows.start, rows.stop, step):
        part = slice(start, min(start + step, rows.stop))
        queries = torch.arange(part.start, part.stop, device=v.device)
        scores = plane.compute_masked_scores(queries, columns)
        b, h = (torch.tensor([index], device=v.device) for index in (plane.b, 0))
        scores.masked_fill_(~mask.can_see(b, h, queries.unsqueeze(-1), columns, plane.offset), -torch.inf)
        write_rows(plane, complete, scores, v, columns, part, found, policy)


def write_rows(
    plane: Plane,
    complete: AppliedWeights,
    scores: Tensor,
    v: Tensor,
    columns: Tensor,
    rows: slice,
    found: RowMeasures,
    policy: int,
) -> None:
    """Write what some rows keep, from their scores (n, m) with some keys (m,), -inf for those dropped."""
    place = policy, plane.b, plane.h, rows
    context, below, distance = complete.product[rows], complete.denominators[rows], complete.distance[rows]
    kept = (scores > -torch.inf).sum(-1)
    if not bool(kept.all()):
        raise ConfigError(kept_rows.describe_empty_row(rows.start + int((kept == 0).nonzero()[0]), plane.h))
    ours, exponentials = exponentiate_rows(scores, plane.sink)
    weights = ours.divide(exponentials)
    change = multiply_exactly(weights, v[columns]) - context
    # a quotient near 1 and a difference near 0 keep the digits that log-sum-exp has lost where scores are large
    kl = ((below.total / ours.total).log() + (below.shift - ours.shift)).clamp(min=0)
    size, error = context.norm(dim=-1), change.norm(dim=-1)
    found.kl[place], found.recall[place] = kl, (-kl).exp()
    found.output_error[place] = torch.where(size > 0, error / size, error)
    found.kept[place] = kept.int()
    positions, share = torch.arange(rows.start, rows.stop, device=v.device), -torch.expm1(-kl)
    near = weights.sum(-1) * positions - multiply_exactly(weights, columns.to(weights.dtype))
    dropped = (distance - (1 - share) * near) / share
    found.dropped_distance[place] = dropped.masked_fill(share <= LEAST_DROPPED, torch.nan)
