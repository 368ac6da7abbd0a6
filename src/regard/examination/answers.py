"""What a subject returns: which of it is the context, and which the weights."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from regard.errors import ConfigError

ROWS = 1e-2  # how far a row of weights may be from one, in half precision too
CONTEXTS = ("hidden_states", "last_hidden_state", "context", "attn_output", "attention_output", "output", "out")


class Answer(NamedTuple):
    """What a subject gives: the context as it is, and its weights, (b, q, k) or (b, h, q, k), where it returns them."""

    context: Tensor
    weights: Tensor | None = None


def answered(returned: object, queries: int, place: Sequence[int] = (), keys: int | None = None) -> Answer:
    """The context and the weights in what a subject returned: a tensor, or a record or tuple that holds one.

    The context is the first of shape (*place, c), and no table of weights if there is another; the weights are of shape
    (b, q, k) or (b, h, q, k), and the first whose rows add to one if there are several.
    """
    named = fields_of(returned) or {}
    first = [named[name] for name in CONTEXTS if name in named]
    parts = [one for one in (*first, *parts_of(returned)) if isinstance(one, Tensor)]
    if not parts:
        raise ConfigError(f"a subject returns its context, or (context, weights); this one returned {type(returned).__name__}.")
    fits = [one for one in parts if one.is_floating_point() and one.shape[:-1] == torch.Size(place or parts[0].shape[:-1])]
    square = (queries, keys or queries)
    context = next((one for one in fits if len(fits) == 1 or not weighing(one, square)), (fits or parts)[0])
    tables = [one for one in parts if one is not context and is_table(one, context, square)]
    return Answer(context, next((one for one in tables if weighing(one, square)), tables[0] if tables else None))


def parts_of(returned: object) -> list[object]:
    """What a record or a tuple holds, or the thing itself."""
    named = fields_of(returned)
    if named is not None:
        return list(named.values())
    return list(returned) if isinstance(returned, (tuple, list)) else [returned]


def fields_of(returned: object) -> dict[str, object] | None:
    """The named parts of a record; None of what has none."""
    if isinstance(returned, Mapping):
        return {str(name): one for name, one in returned.items()}
    if dataclasses.is_dataclass(returned) and not isinstance(returned, type):
        return {field.name: getattr(returned, field.name) for field in dataclasses.fields(returned)}
    if isinstance(returned, tuple) and hasattr(returned, "_fields"):
        return dict(zip(returned._fields, returned, strict=True))
    return None


def is_table(one: Tensor, context: Tensor, square: tuple[int, int]) -> bool:
    """Whether a tensor has the shape of weights beside a context, (b, q, k) or (b, h, q, k); without b beside (t, c)."""
    axes = (2, 3) if context.dim() == 2 else (3, 4)
    batched = context.dim() == 2 or (one.dim() > 0 and len(one) == len(context))
    return one.is_floating_point() and one.dim() in axes and one.shape[-2:] == square and batched


def weighing(one: Tensor, square: tuple[int, int]) -> bool:
    """Whether a tensor's rows, as long as there are keys, add to one, with nothing below 0."""
    if one.shape[-2:] != square:
        return False
    table = one.detach().float()
    return bool((table >= 0).all() and ((table.sum(-1) - 1).abs() < ROWS).all())


def stacked(answers: list[Answer]) -> Answer:
    """The answers to several sequences as that to a batch."""
    weights = [one.weights for one in answers if one.weights is not None]
    return Answer(torch.stack([one.context for one in answers]), torch.stack(weights) if weights else None)
