"""Weights that no softmax of q and k gives, with scores changed by an intervention, and the contexts that they make of v."""

from dataclasses import replace

import torch
from torch import Tensor

from regard.map.scored_matrix import ScoredMatrix
from regard.map.stored_matrix import StoredMatrix
from regard.mechanism.heads import share
from regard.observe.interception.attention_call import AttentionCall, CallAdapter
from regard.observe.interception.plain_tensors import UnreadableError
from regard.observe.interception.recurrent.recurrence_call import RecurrenceCall, RecurrenceFactors

BY_ROW = "the rows of its batch hide different keys, which is done to a softmax alone"


def change_weights(changed: AttentionCall, adapter: CallAdapter) -> tuple[Tensor, CallAdapter] | None:
    """Return the weights (b, h, q, k) of a plain call with its mask and queries changed, and how it runs; None if none change.

    The queries, all alike in a head, are what its scores are multiplied by. Rows of weights that do not change keep the context
    of the model's own product. Raises UnreadableError if the weights cannot be computed.
    """
    read_context, write = adapter.context, adapter.result
    assert read_context is not None
    assert write is not None
    assert changed.v is not None
    result = adapter.run()
    context = read_context(result)
    weights, is_changed = compute_weights(changed, adapter)
    if not is_changed.any():
        return None
    dtype = torch.promote_types(weights.dtype, changed.v.dtype)
    new = weights.to(dtype) @ share(changed.v.to(dtype), weights.shape[1])
    context = torch.where(is_changed.unsqueeze(-1), new.to(context.dtype), context)
    return weights, replace(adapter, run=lambda: write(context, result), plain_call=changed, weights=weights)


def cut_entries(changed: AttentionCall, adapter: CallAdapter) -> CallAdapter:
    """Return how a call runs without the entries of its matrix that the mask of a changed plain call hides anew.

    Raises UnreadableError if they are not known.
    """
    read_context, write = adapter.context, adapter.result
    assert read_context is not None
    assert write is not None
    assert adapter.cut_entries is not None
    assert adapter.plain_call is not None
    (b, h, n, _), k = changed.q.shape, changed.k.shape[2]
    every, keys = (torch.arange(size, device=changed.q.device) for size in (n, k))
    before, after = (one.mask.block(every, keys, one.offset).expand(b, h, n, k) for one in (adapter.plain_call, changed))
    hidden = before & ~after
    if not hidden.any():
        return adapter
    hidden = hidden if adapter.hidden is None else hidden | adapter.hidden
    run_whole = adapter.run_whole or adapter.run
    result = run_whole()
    context = adapter.cut_entries(read_context(result), hidden)
    return replace(adapter, run=lambda: write(context, result), run_whole=run_whole, plain_call=changed, hidden=hidden)


def store_changed_weights(call: RecurrenceCall, weights: Tensor, context: Tensor) -> RecurrenceCall:
    """Return a call of weights that are no softmax with changed ones, and the context that they make."""

    def read() -> RecurrenceFactors:
        found = call.read()
        title = found.mechanism.title if isinstance(found.mechanism, ScoredMatrix | StoredMatrix) else ""
        mechanism = StoredMatrix(entries=weights.detach(), title=title)
        return replace(found, mechanism=mechanism, outputs=context.detach().expand(found.outputs.shape), note="")

    return replace(call, read=read, read_softmaxes=list)


def compute_weights(changed: AttentionCall, adapter: CallAdapter) -> tuple[Tensor, Tensor]:
    """Compute the weights (b, h, q, k) of a changed call, and which rows of which heads (h, q) are not as they were."""
    assert adapter.change_weights is not None
    assert adapter.weights is not None
    (b, h, n, _), k = changed.q.shape, changed.k.shape[2]
    device = changed.q.device
    table = changed.mask.block(torch.arange(n, device=device), torch.arange(k, device=device), changed.offset)
    if len(table) > 1:
        raise UnreadableError(BY_ROW)
    visible, factors = table[0].expand(h, n, k), changed.q[0, :, 0, 0]
    is_changed = ~visible.all(-1) | (factors != 1).unsqueeze(-1)
    weights, remaining = adapter.weights.expand(b, h, n, k), is_changed.any(-1)
    for head in range(h):
        if remaining[head]:
            is_alike = remaining & (factors == factors[head]) & (visible == visible[head]).all(-1).all(-1)
            new = adapter.change_weights(visible[head], float(factors[head]))
            weights = torch.where((is_changed & is_alike.unsqueeze(-1)).unsqueeze(-1), new, weights)
            remaining = remaining & ~is_alike
    return weights, is_changed
