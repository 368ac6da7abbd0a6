"""What policies drop, for every row of a layer: blocks of queries with only the keys that a policy lets them use.

No matrix is stored: of the complete attention one traversal gives every row's denominator and output, and of a policy each
block of queries is computed with the keys that any of them may use, which are few.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard.errors import ConfigError
from regard.map import AttentionMap
from regard.map.plane import BLOCK_NUMBERS, Denominators, Plane, exponentiate_rows, multiply_exactly
from regard.mechanism import spans
from regard.mechanism.mask_algebra import Mask, check_mask
from regard.mechanism.scores import score_dtype
from regard.policies import AttentionInputs, Lifetime, Policy
from regard.policies.attention_inputs import CAUSAL
from regard.policies.key_masks import NEVER

ROWS = 256  # queries of a block


@dataclass(frozen=True, eq=False)
class RowMeasures:
    """What some policies keep in every row: recall, KL in nats, error of the output and number of keys, (policy, b, h, q)."""

    recall: Tensor
    kl: Tensor
    output_error: Tensor
    kept: Tensor  # int32

    @classmethod
    def of_complete_rows(cls, inputs: AttentionInputs, policies: int) -> "RowMeasures":
        """Return the measures of rows that keep everything."""
        b, h, t, _ = inputs.q.shape
        shape, dtype = (policies, b, h, t), score_dtype(inputs.q.dtype)
        ranges = inputs.mask.find_key_ranges(t, t, 0)
        assert ranges is not None
        kept = (ranges[1] - ranges[0])[0].to(inputs.q.device).expand(shape).clone()
        zeros = inputs.q.new_zeros(shape, dtype=dtype)
        return cls(torch.ones_like(zeros), zeros, zeros.clone(), kept)


def measure_layer(inputs: AttentionInputs, policies: Sequence[Policy]) -> RowMeasures:
    """Measure every row of a layer under some policies. Raises ConfigError where one keeps no key."""
    found, whole = RowMeasures.of_complete_rows(inputs, len(policies)), inputs.build_map()
    masks = [check_mask(policy.choose_keys(inputs)) for policy in policies]
    values = inputs.require_values("an audit")
    context = whole._apply_and_keep_denominators(values)
    for plane in whole._iterate_planes():
        below, b, h = whole._get_denominators(plane), plane.b, plane.h
        v = values[b, h // inputs.heads_per_key]
        for n, mask in enumerate(masks):
            own = mask.select_heads([h])
            kept = find_kept_prompt(inputs, own, b)
            if kept is not None:
                measure_short_cache(inputs, kept, below, context[b, h], v, found, (n, b, h))
                continue
            for start in range(0, inputs.tokens, ROWS):
                measure_block(plane, below, context[b, h], v, own, slice(start, min(start + ROWS, inputs.tokens)), found, n)
    for n, policy in enumerate(policies):
        cache = policy.change_cache(inputs)
        if cache is not None:
            measure_changed_cache(inputs, *cache, found, n)
    return found


def find_kept_prompt(inputs: AttentionInputs, mask: Mask, b: int) -> Tensor | None:
    """Return the keys of the prompt that a cache keeps, if nothing else is ever evicted from it; None for any other mask."""
    if not isinstance(mask, Lifetime) or inputs.mask != CAUSAL or inputs.bias is not None or inputs.prompt == inputs.tokens:
        return None
    ends = mask.ends[b if mask.batch > 1 else 0, 0]
    stays, leaves = ends == NEVER, ends == inputs.prompt
    if not bool((stays | leaves).all()) or not bool(stays[inputs.prompt :].all()):
        return None
    return stays[: inputs.prompt].nonzero().squeeze(-1)


def measure_short_cache(
    inputs: AttentionInputs,
    kept: Tensor,
    below: Denominators,
    context: Tensor,
    v: Tensor,
    found: RowMeasures,
    place: tuple[int, int, int],
) -> None:
    """Measure the rows after the prompt of one head, whose cache is some keys of the prompt (n,) and all later ones.

    That is causal attention to fewer keys, for which the map has its compiled passes.
    """
    _, b, h = place
    columns = torch.cat([kept, torch.arange(inputs.prompt, inputs.tokens, device=kept.device)])
    group, rows = h // inputs.heads_per_key, slice(inputs.prompt, inputs.tokens)
    short = AttentionMap(
        inputs.q[b : b + 1, h : h + 1, rows],
        inputs.k[b : b + 1, group : group + 1, columns],
        CAUSAL,
        scale=inputs.scale,
        softcap=inputs.softcap,
        sinks=None if inputs.sinks is None else inputs.sinks[h : h + 1],
        offset=len(kept),
    )
    theirs = short._apply_and_keep_denominators(v[columns].view(1, 1, len(columns), -1))[0, 0]
    (plane,) = short._iterate_planes()
    counts = len(kept) + torch.arange(1, inputs.tokens - inputs.prompt + 1, device=kept.device)
    compare_rows(below[rows], short._get_denominators(plane), context[rows], theirs, counts, found, (*place, rows))


def measure_changed_cache(inputs: AttentionInputs, k: Tensor, v: Tensor, found: RowMeasures, policy: int) -> None:
    """Measure the rows after the prompt whose queries read other keys (b, g, t, d) and values (b, g, t, e).

    recall is what the two distributions have in common, Σ min(p, p'), which for dropped keys is the share that is kept.
    """
    first, values = inputs.prompt, inputs.require_values("an audit")
    maps = [one.build_map(first) for one in (inputs, replace(inputs, q=inputs.q.to(k.dtype), k=k))]
    for plane, other in zip(*(one._iterate_planes() for one in maps), strict=True):
        group = plane.h // inputs.heads_per_key
        for run, changed in zip(plane.iterate_runs(), other.iterate_runs(), strict=True):
            place = (policy, plane.b, plane.h, slice(first + run.start, first + run.stop))
            ours, theirs = (
                one.masked - one.denominators.shift.unsqueeze(-1) - one.denominators.total.log().unsqueeze(-1)
                for one in (changed, run)
            )
            divergence = changed.weights * (ours - theirs).masked_fill(changed.weights == 0, 0)
            context = multiply_exactly(run.weights, values[plane.b, group, run.columns])
            error = (multiply_exactly(changed.weights, v[plane.b, group, run.columns]) - context).norm(dim=-1)
            size = context.norm(dim=-1)
            found.kl[place] = divergence.sum(-1).clamp(min=0)
            found.recall[place] = torch.minimum(run.weights, changed.weights).sum(-1).clamp(max=1)
            found.output_error[place] = torch.where(size > 0, error / size, error)


def measure_block(
    plane: Plane, below: Denominators, context: Tensor, v: Tensor, mask: Mask, rows: slice, found: RowMeasures, policy: int
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
        write_rows(plane, below[part], context[part], scores, v[columns], part, found, policy)


def write_rows(
    plane: Plane,
    below: Denominators,
    context: Tensor,
    scores: Tensor,
    v: Tensor,
    rows: slice,
    found: RowMeasures,
    policy: int,
) -> None:
    """Compare rows of kept scores (n, m) with the complete rows, given their denominators and contexts (n, e)."""
    place = (policy, plane.b, plane.h, rows)
    kept = (scores > -torch.inf).sum(-1)
    if not bool(kept.all()):
        query = rows.start + int((kept == 0).nonzero()[0])
        raise ConfigError(
            f"a policy keeps no key for query {query:,} in head {plane.h}: it must leave each query at least one "
            "that the model sees."
        )
    ours, exponentials = exponentiate_rows(scores, plane.sink)
    theirs = multiply_exactly(ours.divide(exponentials), v)
    compare_rows(below, ours, context, theirs, kept, found, place)


def compare_rows(
    below: Denominators,
    ours: Denominators,
    context: Tensor,
    theirs: Tensor,
    kept: Tensor,
    found: RowMeasures,
    place: tuple[int, int, int, slice],
) -> None:
    """Write what some rows keep, from the denominators and contexts (n, e) of the complete rows and of the kept keys."""
    # a quotient near 1 and a difference near 0 keep the digits that log-sum-exp has lost where scores are large
    kl = (below.total / ours.total).log() + (below.shift - ours.shift)
    kl = kl.clamp(min=0)
    size = context.norm(dim=-1)
    error = (theirs - context).norm(dim=-1)
    found.kl[place], found.recall[place] = kl, (-kl).exp()
    found.output_error[place] = torch.where(size > 0, error / size, error)
    found.kept[place] = kept.int()
