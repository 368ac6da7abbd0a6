"""Localize an error: find the first module of a model that goes wrong although its own input does not."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from regard.examination.subject.adapters import SubjectError
from regard.examination.subject.token_model import TokenModel

PartCallback = Callable[[str, nn.Module, tuple[Any, ...], dict[str, Any], Any], None]

Outcome = tuple[str, list[Tensor], list[Tensor]]


def find_moving_module(model: TokenModel, changed: Tensor, b: int, i: int) -> str:
    """Return the first, innermost module whose output for token i of sequence b changes with these ids while its inputs do not.

    "" if there is none.
    """
    before, after = record_outcomes(model, model.ids, b, i), record_outcomes(model, changed, b, i)
    for (name, came, gave), (_, came_then, gave_then) in zip(before, after, strict=False):
        if are_all_close(came, came_then) and not are_all_close(gave, gave_then):
            return name
    return ""


def find_breaking_module(model: TokenModel) -> str:
    """Return the first, innermost module that returns non-finite numbers for finite inputs; "" if there is none."""
    every = record_outcomes(model, model.ids, 0, None)
    return next((name for name, came, gave in every if is_finite(came) and not is_finite(gave)), "")


def is_attention_like(model: TokenModel, name: str) -> bool:
    """Return whether a module holds matrices and its last output depends on earlier tokens, as in attention, not in a norm."""
    part = model.module.get_submodule(name)
    if not any(weight.dim() == 2 for weight in part.parameters()):
        return False
    found: list[bool] = []

    def hook(_: nn.Module, given: tuple[Any, ...], output: Any) -> None:
        first = next((one for one in given if isinstance(one, Tensor) and one.dim() == 3 and one.is_floating_point()), None)
        if first is not None and not found:
            found.append(False)  # set first: the call below runs this hook again
            other = first.clone()
            other[:, :-1] = other[:, :-1].roll(1, -1) + 1
            again = part(*(other if one is first else one for one in given))
            found[0] = not are_all_close(take_last_tokens(output), take_last_tokens(again))

    handle = part.register_forward_hook(hook)
    try:
        model.run()
    except SubjectError:  # the module rejects other inputs
        return False
    finally:
        handle.remove()
    return any(found)


def take_last_tokens(output: Any) -> list[Tensor]:
    """Return the last token of each sequence in a module's outputs."""
    parts = output if isinstance(output, (tuple, list)) else [output]
    return [one[:, -1] for one in parts if isinstance(one, Tensor) and one.dim() == 3]


def record_outcomes(model: TokenModel, ids: Tensor, b: int, i: int | None) -> list[Outcome]:
    """Return the inputs and outputs of each module for token i of sequence b, or for all its tokens, in order of completion."""
    found: list[Outcome] = []

    def record_outcome(name: str, _: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        came, gave = (select_token(values, ids.shape, b, i) for values in ([*inputs, *named.values()], [output]))
        found.append((name, came, gave))

    with hook_parts(model.module, record_outcome):
        model.run(ids)
    return found


def select_token(values: Sequence[Any], shape: torch.Size, b: int, i: int | None) -> list[Tensor]:
    """Return token i, or all tokens, of sequence b in every tensor (b, t, ...) or (b t, ...) among values."""
    flat = [one for value in values for one in (value if isinstance(value, (tuple, list)) else [value])]
    kept = [one for one in flat if isinstance(one, Tensor) and one.dim() >= 2]
    sequences = [one.unflatten(0, shape) if len(one) == shape.numel() != shape[0] else one for one in kept]
    every = [one for one in sequences if one.shape[1] == shape[1] and len(one) > b]
    return [(one[b] if i is None else one[b, i]).detach().clone() for one in every]


def are_all_close(one: list[Tensor], other: list[Tensor]) -> bool:
    """Return whether two lists of tensors are equal up to rounding."""
    return len(one) == len(other) and all(
        a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=1e-5, atol=1e-7, equal_nan=True)
        for a, b in zip(one, other, strict=True)
    )


def is_finite(values: list[Tensor]) -> bool:
    """Return whether all numbers in the tensors are finite."""
    return all(bool(one.isfinite().all()) for one in values)


@contextlib.contextmanager
def hook_parts(module: nn.Module, callback: PartCallback) -> Iterator[None]:
    """Call callback(name, part, inputs, named, output) for each part that runs in the block, in order of completion."""

    def make_hook(name: str) -> Callable[..., None]:
        return lambda part, inputs, named, output: callback(name, part, inputs, named, output)

    parts = [(name, part) for name, part in module.named_modules() if name]
    hooks = [part.register_forward_hook(make_hook(name), with_kwargs=True) for name, part in parts]
    try:
        yield
    finally:
        for one in hooks:
            one.remove()
