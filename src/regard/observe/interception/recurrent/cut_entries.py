"""Outputs of recurrences without some entries of the layer's matrix."""

from torch import Tensor

from regard.map.implicit_map import ImplicitMap


def subtract_entries(matrix: ImplicitMap, values: Tensor, gates: Tensor | None, context: Tensor, hidden: Tensor) -> Tensor:
    """Return a context (b, h, q, e) less the hidden entries (b, h, q, k) of a matrix, times their values, and gated.

    Rows without hidden entries keep every bit.
    """
    new, columns = context.clone(), hidden.any(2).any(0).any(0).nonzero().flatten()
    for row, head in hidden.flatten(2).any(-1).nonzero().tolist():
        own = hidden[row, head]
        queries = own.any(-1).nonzero().flatten()
        entries = matrix[row, head, queries][:, columns] * own[queries][:, columns]
        part = entries @ values[row, head, columns].to(entries.dtype)
        part = part if gates is None else part * gates[row, head, queries]
        new[row, head, queries] -= part.to(new.dtype)
    return new
