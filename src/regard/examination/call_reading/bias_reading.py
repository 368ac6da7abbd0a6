"""Read which keys a call hides, and a bias linear in the distance of a key, as ALiBi's: -slope * (i - j)."""

import torch
from torch import Tensor

from regard.examination import mask_requirements
from regard.examination.call_reading.inner_calls import InnerCall
from regard.mechanism import Causal

HIDDEN = -1e4  # a bias below it hides a key
NEAR = 1e-4  # of the largest number


def read_slopes(one: InnerCall) -> Tensor | None:
    """Return the slope of the bias of each head, (h,), above 0 if it falls with the distance; None if it is no such bias.

    The call is causal, so that each key comes before its query, or the bias is the same on both sides of a query.
    """
    bias = one.call.bias
    if bias is None or one.is_stored_as_weights or bias.shape[-1] < 3:
        return None
    is_hidden = bias.shape[-2] == bias.shape[-1] and bool((bias[..., 0, 1:] < HIDDEN).all())
    steps = bias[..., -1, :].double().diff(dim=-1)  # of the last query, over its keys
    is_mirrored = bias.shape[-2] == bias.shape[-1] and torch.equal(bias[..., 0, :], bias[..., -1, :].flip(-1))
    if one.call.mask != Causal() and not is_hidden and not is_mirrored:
        return None  # keys on both sides
    if not steps.isfinite().all() or not steps.any() or (steps - steps[..., :1]).abs().max() > NEAR * steps.abs().max():
        return None
    slopes: Tensor = steps[..., 0].reshape(-1, steps.shape[-2] if steps.dim() > 1 else 1)[0]  # of the first sequence
    return slopes


def read_linear_slopes(one: InnerCall) -> Tensor | None:
    """Return the step of each head's bias from key to key, (h,), if linear on both sides of a query, all seen; else None."""
    bias, (_, _, t, _) = one.call.bias, one.call.q.shape
    if bias is None or one.is_stored_as_weights or bias.shape[-1] != t or t < 3:
        return None
    seen, steps = read_seen(one), bias.double().diff(dim=-1)
    if seen is None or not bool(seen.all()) or not bool(steps.isfinite().all()):
        return None
    spread = (steps - steps[..., :1, :1]).abs().amax((-1, -2))
    if not bool((spread < NEAR * steps.abs().amax((-1, -2))).all()):
        return None
    slopes: Tensor = steps[..., 0, 0].reshape(-1, steps.shape[-3] if steps.dim() > 2 else 1)[0]
    return slopes


def list_alibi_slopes(heads: int) -> Tensor:
    """Return the slopes of ALiBi for a number of heads, (h,), in float64: Press et al. 2022, section 3, and their code."""
    near = 1 << (heads.bit_length() - 1)  # a power of 2
    every = 2.0 ** (-8 / near * torch.arange(1, near + 1, dtype=torch.float64))
    return every if near == heads else torch.cat((every, list_alibi_slopes(2 * near)[::2][: heads - near]))


def find_viewed_table(one: InnerCall) -> str:
    """Return the table (positions, h) whose rows by an index (q, k) are the bias if they are viewed as (h, q, k); else "".

    The index is a buffer of the module, as Swin's relative positions.
    """
    bias, module, (_, h, q, _), k = one.call.bias, one.module, one.call.q.shape, one.call.k.shape[2]
    if bias is None or module is None or h == 1 or bias.shape[-3:] != (h, q, k):
        return ""
    found = bias.double().reshape(-1, h, q, k)[0]
    indices = [index for index in module.buffers() if not index.is_floating_point() and index.numel() == q * k]
    for name, table in module.named_parameters():
        for index in indices if table.dim() == 2 and table.shape[1] == h else ():
            if int(index.min()) < 0 or int(index.max()) >= len(table):
                continue
            rows = table.detach().double()[index.flatten().long()]
            near = NEAR * float(rows.abs().max())
            if bool((rows.view(h, q, k) - found).abs().max() <= near < (rows.T.view(h, q, k) - found).abs().max()):
                return name
    return ""


def read_seen(one: InnerCall) -> Tensor | None:
    """Return which keys are not hidden, bool (b, q, k), in any head; None if only weights are known."""
    call = one.call
    if one.is_stored_as_weights:
        return None
    b, _, q, _ = call.q.shape
    if call.mask.batch not in (1, b):
        return None
    seen = mask_requirements.expand_mask(call.mask, b, q, call.k.shape[2], call.offset)
    if call.bias is None:
        return seen
    shown = call.bias > HIDDEN
    return seen & (shown.any(-3) if shown.dim() > 2 else shown).cpu()
