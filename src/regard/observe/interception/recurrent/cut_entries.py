"""Outputs of recurrences without some entries of the layer's matrix."""

import torch
from torch import Tensor

from regard.map.implicit_map import ImplicitMap
from regard.observe.interception.plain_tensors import UnreadableError
from regard.observe.interception.recurrent.recurrence_call import RecurrenceCall

NO_GRADIENTS = "entries of a recurrence are cut without gradients alone: use torch.no_grad()"


def cut_entries(call: RecurrenceCall, context: Tensor, hidden: Tensor) -> Tensor:
    """Return a context (b, h, q, e) less the hidden entries (b, h, q, k) of the matrix of a call, times their values.

    Rows without hidden entries keep every bit. Raises UnreadableError where gradients are computed: the entries have none.
    """
    if torch.is_grad_enabled() and context.requires_grad:
        raise UnreadableError(NO_GRADIENTS)
    factors, new = call.read(), context.clone()
    matrix, columns = ImplicitMap(factors.mechanism), hidden.any(2).any(0).any(0).nonzero().flatten()
    for row, head in hidden.flatten(2).any(-1).nonzero().tolist():
        own = hidden[row, head]
        queries = own.any(-1).nonzero().flatten()
        entries = matrix[row, head, queries][:, columns] * own[queries][:, columns]
        part = entries @ factors.values[row, head, columns].to(entries.dtype)
        part = part if factors.gates is None else part * factors.gates[row, head, queries]
        new[row, head, queries] -= part.to(new.dtype)
    return new
