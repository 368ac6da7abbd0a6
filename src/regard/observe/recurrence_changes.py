"""Changes of recurrences: which an intervention can make, and outputs without some entries of the layer's matrix."""

import torch
from torch import Tensor

from regard.map.convolution import Convolution
from regard.map.implicit_map import ImplicitMap
from regard.observe.attention_changes import Change, KnockOut, Patch
from regard.observe.interception.attention_call import AttentionCall
from regard.observe.interception.recurrent.recurrence_call import RecurrenceCall, RecurrenceFactors

CONTINUED = "it continues a state of tokens whose positions are not known, so that only KnockOut without a source changes it"
NO_SCORES = "it has no scores that a temperature divides"
NO_GRADIENTS = "entries of a recurrence are cut without gradients alone: use torch.no_grad()"
OTHER_OUTPUT = "its output is not its weights times the values alone: it has a bias or a gate"
NO_WEIGHTS = "weights of a recurrence are not patched: patch its output"


def explain_impossible(
    change: Change, call: RecurrenceCall, plain: AttentionCall, changed: AttentionCall, context: Tensor
) -> str:
    """Return why a change that makes a plain call a changed one cannot be made of a recurrence; "" if it can."""
    if call.initial_state is not None and not (isinstance(change, KnockOut) and change.source is None):
        return CONTINUED
    if changed is not plain and changed.q is not plain.q:
        return NO_SCORES
    if changed is not plain and torch.is_grad_enabled() and context.requires_grad:
        return NO_GRADIENTS
    if isinstance(change, Patch) or (isinstance(change, KnockOut) and change.source is not None):
        if isinstance(change, Patch) and change.of == "weights":
            return NO_WEIGHTS
        found = call.read()
        if found.gates is not None or (isinstance(found.mechanism, Convolution) and found.mechanism.bias is not None):
            return OTHER_OUTPUT
    return ""


def subtract_entries(context: Tensor, changed: AttentionCall, factors: RecurrenceFactors) -> Tensor:
    """Return a context (b, h, q, e) without the entries of a matrix that the mask of a plain call hides, times their values.

    Rows that see all keys keep every bit.
    """
    (b, h, n, _), k = changed.q.shape, changed.k.shape[2]
    every, keys = (torch.arange(size, device=context.device) for size in (n, k))
    hidden = ~changed.mask.block(every, keys, changed.offset).expand(b, h, n, k)
    matrix = ImplicitMap(factors.mechanism)
    columns = hidden.any(2).any(0).any(0).nonzero().flatten()
    new = context.clone()
    for row in range(b):
        for head in range(h):
            queries = hidden[row, head].any(-1).nonzero().flatten()
            if len(queries):
                entries = matrix[row, head, queries][:, columns] * hidden[row, head][queries][:, columns]
                part = entries @ factors.values[row, head, columns].to(entries.dtype)
                part = part if factors.gates is None else part * factors.gates[row, head, queries]
                new[row, head, queries] -= part.to(new.dtype)
    return new
