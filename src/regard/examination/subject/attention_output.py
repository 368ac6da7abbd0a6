"""Find the context and the attention weights in what a subject returns."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from regard.errors import ConfigError

ROW_TOLERANCE = 1e-2  # tolerance of a row's sum of weights, in half precision too
CONTEXT_NAMES = ("hidden_states", "last_hidden_state", "context", "attn_output", "attention_output", "output", "out")


class AttentionOutput(NamedTuple):
    """What a subject returns: the context unchanged, and its weights, (b, q, k) or (b, h, q, k), or None."""

    context: Tensor
    weights: Tensor | None = None


def extract_output(returned: object, queries: int, place: Sequence[int] = (), keys: int | None = None) -> AttentionOutput:
    """Return the context and the weights in what a subject returned: a tensor, or a record or tuple that holds one.

    The context is the first tensor of shape (*place, c), fields named in CONTEXTS before others, and not a table of weights if
    another one fits. The weights have shape (b, q, k) or (b, h, q, k); of several, the first whose rows add to one. Raises
    ConfigError if there is no tensor.
    """
    named = get_fields(returned) or {}
    first = [named[name] for name in CONTEXT_NAMES if name in named]
    parts = [one for one in (*first, *list_parts(returned)) if isinstance(one, Tensor)]
    if not parts:
        raise ConfigError(f"examine expects a context, or (context, weights); the subject returned {type(returned).__name__}.")
    fits = [one for one in parts if one.is_floating_point() and one.shape[:-1] == torch.Size(place or parts[0].shape[:-1])]
    square = (queries, keys or queries)
    context = next((one for one in fits if len(fits) == 1 or not has_normalized_rows(one, square)), (fits or parts)[0])
    tables = [one for one in parts if one is not context and has_weights_shape(one, context, square)]
    return AttentionOutput(
        context, next((one for one in tables if has_normalized_rows(one, square)), tables[0] if tables else None)
    )


def list_parts(returned: object) -> list[object]:
    """Return the values of a record, mapping, tuple or list as a list, or a list of the object itself."""
    named = get_fields(returned)
    if named is not None:
        return list(named.values())
    return list(returned) if isinstance(returned, (tuple, list)) else [returned]


def get_fields(returned: object) -> dict[str, object] | None:
    """Return the named fields of a mapping, dataclass or named tuple; None for anything else."""
    if isinstance(returned, Mapping):
        return {str(name): one for name, one in returned.items()}
    if dataclasses.is_dataclass(returned) and not isinstance(returned, type):
        return {field.name: getattr(returned, field.name) for field in dataclasses.fields(returned)}
    if isinstance(returned, tuple) and hasattr(returned, "_fields"):
        return dict(zip(returned._fields, returned, strict=True))
    return None


def has_weights_shape(one: Tensor, context: Tensor, square: tuple[int, int]) -> bool:
    """Return whether a tensor has the shape of weights for a context: (b, q, k) or (b, h, q, k), without b for (t, c)."""
    axes = (2, 3) if context.dim() == 2 else (3, 4)
    batched = context.dim() == 2 or (one.dim() > 0 and len(one) == len(context))
    return one.is_floating_point() and one.dim() in axes and one.shape[-2:] == square and batched


def has_normalized_rows(one: Tensor, square: tuple[int, int]) -> bool:
    """Return whether a tensor's last two axes are `square`, its rows add to one and no entry is negative."""
    if one.shape[-2:] != square:
        return False
    table = one.detach().float()
    return bool((table >= 0).all() and ((table.sum(-1) - 1).abs() < ROW_TOLERANCE).all())


def stack_outputs(answers: list[AttentionOutput]) -> AttentionOutput:
    """Stack the answers for several sequences into the answer for a batch."""
    weights = [one.weights for one in answers if one.weights is not None]
    return AttentionOutput(torch.stack([one.context for one in answers]), torch.stack(weights) if weights else None)
