"""Budgets: how many keys a policy keeps, as a number or as a share of the prompt, for all layers and heads or for each."""

import torch
from torch import Tensor

from regard.errors import ConfigError
from regard.mechanism.arguments import check_count, check_number, describe_value

ROUNDING = 2**-50  # more than a share k / t and its product with t lose by rounding, each at most 2**-53 of it
HeadBudget = int | float
Budget = int | float | tuple[HeadBudget | tuple[HeadBudget, ...], ...]


def check_budget(name: str, budget: object) -> Budget:
    """Return a budget: keys, at least 1, a share above 0 and at most 1, or a tuple of these by layer and by key head.

    Raises ConfigError for anything else.
    """
    if isinstance(budget, tuple):
        if not budget:
            raise ConfigError(f"{name} must have a budget for each layer; got an empty tuple.")
        return tuple(
            tuple(check_amount(name, one) for one in each) if isinstance(each, tuple) else check_amount(name, each)
            for each in budget
        )
    return check_amount(name, budget)


def check_amount(name: str, amount: object) -> HeadBudget:
    """Return a number of keys of at least 1, or a share above 0 and at most 1. Raises ConfigError for anything else."""
    if isinstance(amount, float):
        if not 0 < check_number(name, amount) <= 1:
            raise ConfigError(
                f"{name} must be a number of keys, such as 256, or a share of the prompt above 0 and at most 1, such as 0.1; "
                f"got {describe_value(amount)}."
            )
        return amount
    return check_count(name, amount, alternative=", or a share of the prompt such as 0.1")


def count_keys(budget: Budget, prompt: int, layer: int, heads: int) -> Tensor:
    """Return the number of keys that each of `heads` key heads of a layer keeps, (g,).

    A share is of the prompt's tokens, rounded down, and at least 1. Raises ConfigError if the budget has too few layers or
    heads.
    """
    if isinstance(budget, tuple) and layer >= len(budget):
        raise ConfigError(f"the budget is for {len(budget)} layers, but there is a layer {layer}: pass one for each layer.")
    own = budget[layer] if isinstance(budget, tuple) else budget
    amounts: tuple[HeadBudget, ...] = own if isinstance(own, tuple) else (own,) * heads
    if len(amounts) != heads:
        raise ConfigError(f"the budget of layer {layer} is for {len(amounts)} key heads, but it has {heads}.")
    return torch.tensor([count_amount(one, prompt) for one in amounts])


def count_amount(amount: HeadBudget, prompt: int) -> int:
    """Return the number of keys that an amount means for a prompt; a share k / t of t tokens is k, and 0.29 of 100 is 29."""
    return max(1, int(prompt * amount * (1 + ROUNDING))) if isinstance(amount, float) else amount


def spread_budget(budget: float, layers: int, *, steepness: float = 20.0) -> tuple[float, ...]:
    """Return a share for each layer, falling from the first layer to the last, with the mean `budget`: a pyramid.

    The last layer has budget / steepness. Where the first one would have more than everything, it has everything and the last
    one more. Source: Cai et al. 2024 (PyramidKV), section 4.2.
    """
    check_amount("budget", budget)
    check_count("layers", layers)
    if not isinstance(budget, float) or not check_number("steepness", steepness) >= 1:
        raise ConfigError(f"budget must be a share such as 0.1 and steepness at least 1; got {budget} and {steepness}.")
    last = budget / steepness
    first = 2 * budget - last
    if first > 1:
        first, last = 1.0, 2 * budget - 1
    steps = max(layers - 1, 1)
    return tuple(first - (first - last) * layer / steps for layer in range(layers)) if layers > 1 else (budget,)
