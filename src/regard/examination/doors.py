"""Doors: the first module of a model at which something goes wrong that its own input does not bring along."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from regard.examination.subjects import AskedError
from regard.examination.tokens import Model
from regard.examination.watched import watched

Outcome = tuple[str, list[Tensor], list[Tensor]]


def moving(model: Model, changed: Tensor, b: int, i: int) -> str:
    """The first and innermost module whose output of token i moves with these ids where nothing that it is given moves."""
    before, after = outcomes(model, model.ids, b, i), outcomes(model, changed, b, i)
    for (name, came, gave), (_, came_then, gave_then) in zip(before, after, strict=False):
        if same(came, came_then) and not same(gave, gave_then):
            return name
    return ""


def breaking(model: Model) -> str:
    """The first and innermost module that gives what is not finite where all that it is given is."""
    every = outcomes(model, model.ids, 0, None)
    return next((name for name, came, gave in every if finite(came) and not finite(gave)), "")


def weighing(model: Model, name: str) -> bool:
    """Whether a module holds matrices, and its last output moves with tokens before it: as attention, and no norm, does."""
    part = model.module.get_submodule(name)
    if not any(weight.dim() == 2 for weight in part.parameters()):
        return False
    found: list[bool] = []

    def hook(_: nn.Module, given: tuple[Any, ...], output: Any) -> None:
        first = next((one for one in given if isinstance(one, Tensor) and one.dim() == 3 and one.is_floating_point()), None)
        if first is not None and not found:
            found.append(False)  # what is called here calls this hook again
            other = first.clone()
            other[:, :-1] = other[:, :-1].roll(1, -1) + 1
            again = part(*(other if one is first else one for one in given))
            found[0] = not same(last(output), last(again))

    handle = part.register_forward_hook(hook)
    try:
        model.run()
    except AskedError:  # it takes no other input
        return False
    finally:
        handle.remove()
    return any(found)


def last(output: Any) -> list[Tensor]:
    """The last token of each sequence in what a module gave."""
    parts = output if isinstance(output, (tuple, list)) else [output]
    return [one[:, -1] for one in parts if isinstance(one, Tensor) and one.dim() == 3]


def outcomes(model: Model, ids: Tensor, b: int, i: int | None) -> list[Outcome]:
    """What each module was given and gave for token i of a sequence, or for all tokens, in the order in which they end."""
    found: list[Outcome] = []

    def keep(name: str, _: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        came, gave = (placed(values, ids.shape, b, i) for values in ([*inputs, *named.values()], [output]))
        found.append((name, came, gave))

    with watched(model.module, keep):
        model.run(ids)
    return found


def placed(values: Sequence[Any], shape: torch.Size, b: int, i: int | None) -> list[Tensor]:
    """Token i, or all of them, of every tensor (b, t, ...) or (b t, ...) among values; of one sequence."""
    flat = [one for value in values for one in (value if isinstance(value, (tuple, list)) else [value])]
    kept = [one for one in flat if isinstance(one, Tensor) and one.dim() >= 2]
    apart = [one.unflatten(0, shape) if len(one) == shape.numel() != shape[0] else one for one in kept]
    every = [one for one in apart if one.shape[1] == shape[1] and len(one) > b]
    return [(one[b] if i is None else one[b, i]).detach().clone() for one in every]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    """Whether tensors are equal, beside rounding."""
    return len(one) == len(other) and all(
        a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=1e-5, atol=1e-7, equal_nan=True)
        for a, b in zip(one, other, strict=True)
    )


def finite(values: list[Tensor]) -> bool:
    """Whether all numbers are."""
    return all(bool(one.isfinite().all()) for one in values)
