"""The context of attention under a policy by the compiled passes of an audit, which multiply kept keys alone."""

import torch
from torch import Tensor

from regard.map import pass_runner
from regard.map.plane import Plane
from regard.mechanism import attention
from regard.mechanism.mask_algebra import EVERYTHING, Mask
from regard.policies import AttentionInputs, ChosenPages, Lines
from regard.policy_audit import chosen_rows, kept_rows


def compute_policy_context(inputs: AttentionInputs, mask: Mask) -> Tensor | None:
    """Compute the context (b, h, t, e) of a layer under the mask of a policy; None for masks that no compiled pass knows.

    inputs have the model's own mask and values. The rows of which no head drops a key are computed by `attention`.
    """
    values, given = inputs.require_values("the context of a policy"), (inputs.q, inputs.k, inputs.v)
    is_finite = bool(inputs.q.isfinite().all()) and bool(inputs.k.isfinite().all())
    is_float32 = all(x is not None and x.dtype == torch.float32 for x in given)  # GPT-Neo's values may be of another dtype
    if not is_float32 or not kept_rows.can_run_compiled(inputs, values) or not is_finite:
        return None
    ends, whole = (kept_rows.find_ends(inputs, one) for one in (mask, EVERYTHING))
    if whole is None:
        return None
    if ends is not None:
        rows = kept_rows.find_incomplete_rows(ends, whole, inputs.prompt)
    elif isinstance(mask, ChosenPages | Lines):
        rows = mask.find_choosing_rows(inputs.tokens)
    else:
        return None
    found = inputs.q.new_empty(*inputs.q.shape[:3], values.shape[3])
    for first, last in ((0, rows.start), (rows.stop, inputs.tokens)):
        if first < last:
            found[:, :, first:last] = attend_to_all_keys(inputs, values, first, last)

    def fill_head(plane: Plane, threads: int) -> None:
        cache = kept_rows.HeadCache(plane, values[plane.b, plane.h // inputs.heads_per_key])
        if isinstance(mask, ChosenPages | Lines):
            kept, _ = chosen_rows.attend_to_chosen_keys(mask, plane, cache, inputs, threads)
        elif ends is not None:
            kept, _ = cache.attend(kept_rows.select_plane(ends, plane), rows, inputs.tokens, threads)
        kept.add_sink(plane)
        found[plane.b, plane.h, rows] = torch.from_numpy(kept.context)

    pass_runner.run_planes(list(inputs.build_map().planes), fill_head)
    return found


def attend_to_all_keys(inputs: AttentionInputs, values: Tensor, first: int, last: int) -> Tensor:
    """Compute the context (b, h, last - first, e) of some queries without a policy."""
    q, k, v = inputs.q[:, :, first:last], inputs.k[:, :, :last], values[:, :, :last]
    return attention(q, k, v, inputs.mask, scale=inputs.scale, softcap=inputs.softcap, sinks=inputs.sinks, offset=first)
