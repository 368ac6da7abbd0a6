"""Check the dropout of a kernel: how many weights it drops, what it multiplies the others by, and whether heads differ."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regard.examination.kernel_checks.auxiliary import split_output
from regard.examination.kernel_checks.shapes import KernelShape, KernelTask
from regard.examination.report import Checked, Finding
from regard.examination.subject.restore_state import seed_generators

TOKENS = 64
SURE = 6.0  # standard errors of a rate
NEAR = 0.02  # of the factor on weights that are kept
FAINT = 1e-3  # weights below it may round to 0
WHAT = "dropout: its rate, and the factor on weights that are kept"


def check_dropout(kernel: Callable[..., Any], rate: float, task: KernelTask) -> Iterator[Finding | Checked]:
    """Check a kernel that drops weights at a rate: with the identity as values, its context is the weights that are left."""
    shape = KernelShape(queries=TOKENS, keys=TOKENS, width=TOKENS, size=0.5)
    given = task.make_formula(shape, 23)
    given = replace(given, v=torch.eye(TOKENS).to(given.v).expand_as(given.v))
    seed_generators(5, task.device)
    with torch.no_grad():
        context, _ = split_output(kernel(given.q, given.k, given.v), ())
    weights = given.convert(torch.float64).weights.cpu()
    left = context.double().cpu()
    large = weights > FAINT
    dropped = (left.abs() < FAINT / 10) & large
    found = float(dropped.sum() / large.sum())
    error = SURE * (max(rate * (1 - rate), 0.01) / float(large.sum())) ** 0.5
    kept = (left / weights)[large & ~dropped]
    factor = float(kept.median()) if kept.numel() else 1.0
    wrong = describe_rate(found, rate, error) or describe_factor(factor, rate)
    if wrong is None and rate and has_equal_heads(dropped, large):
        wrong = "every head drops the same weights", "Draw other numbers for each head and each sequence."
    if wrong is not None:
        yield Finding("wrong dropout", f"{wrong[0]}, at a rate of {rate:g}", wrong[1], 1.4, "dropout")
    else:
        yield Checked(WHAT, f"{found:.3f} of {int(large.sum()):,} weights dropped, and the others multiplied by {factor:.4g}")


def describe_rate(found: float, rate: float, error: float) -> tuple[str, str] | None:
    """Return what is wrong with the share of weights that are dropped, and the cure."""
    if abs(found - rate) <= error:
        return None
    if found == 0:
        return "no weight is dropped", "Pass the rate on to the kernel."
    if abs(found - (1 - rate)) <= error:
        cure = "Keep a weight where a uniform number is at least the rate: the rate is the share that is dropped, not kept."
        return f"{found:.2g} of the weights are dropped: the rate is taken as the share that is kept", cure
    return f"{found:.2g} of the weights are dropped", "Drop a weight where a uniform number in [0, 1) is below the rate."


def describe_factor(factor: float, rate: float) -> tuple[str, str] | None:
    """Return what is wrong with the factor on weights that are kept, and the cure."""
    if abs(factor * (1 - rate) - 1) < NEAR:
        return None
    cure = f"Divide the weights that are kept by 1 - rate = {1 - rate:g}, and do not sum a row again after dropout."
    why = {"they are not divided by 1 - rate": 1.0, "they are divided by the rate": 1 / max(rate, 1e-9)}
    does = next((f": {does}" for does, one in why.items() if abs(factor / one - 1) < NEAR), "")
    return f"the weights that are kept are multiplied by {factor:.4g}, not by {1 / (1 - rate):.4g}{does}", cure


def has_equal_heads(dropped: Tensor, large: Tensor) -> bool:
    """Return whether all heads, or all sequences, drop the same weights."""
    both = large.all(1, keepdim=True) if dropped.shape[1] > 1 else large[:, :0]
    heads = bool(both.any()) and bool(((dropped == dropped[:, :1]) | ~both).all())
    rows = large.all(0, keepdim=True) if len(dropped) > 1 else large[:0]
    return heads or (bool(rows.any()) and bool(((dropped == dropped[:1]) | ~rows).all()))
