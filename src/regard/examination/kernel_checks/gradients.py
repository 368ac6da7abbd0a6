"""Check the gradients of q, k and v that a kernel gives against those of the formula, and the rate of its dropout."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regard.examination.kernel_checks.auxiliary import split_output
from regard.examination.kernel_checks.formula import AttentionFormula, KernelShape, KernelTask, get_allowed_error, measure_error
from regard.examination.report import Checked, Finding
from regard.examination.subject.restore_state import seed_generators
from regard.mechanism.heads import share

NEAR = 3e-3  # of the largest number: how closely a variant fits
Backward = Callable[..., Sequence[Tensor]]
LINE = "dv = pᵀ dc, dp = dc vᵀ, ds = p (dp - rowsum(dp p)), dq = scale ds k, dk = scale dsᵀ q"
TOKENS = 64
SURE = 6.0  # standard errors of a rate
NEAR_FACTOR = 0.02  # of the factor on weights that are kept
FAINT = 1e-3  # weights below it may round to 0
DROPPED = "dropout: its rate, and the factor on weights that are kept"


def compute_kernel_gradients(
    kernel: Callable[[Tensor, Tensor, Tensor], Tensor], backward: Backward | None, given: AttentionFormula, slope: Tensor
) -> dict[str, Tensor] | None:
    """Return the gradients that a kernel gives, by its `backward` if there is one; None if its context has no gradient."""
    if backward is not None:
        return dict(zip(("q", "k", "v"), backward(given.q, given.k, given.v, slope.to(given.q.dtype)), strict=False))
    inputs = [x.detach().clone().requires_grad_() for x in (given.q, given.k, given.v)]
    with torch.enable_grad():
        context = kernel(*inputs)
    if not context.requires_grad:
        return None
    found = torch.autograd.grad(context, inputs, slope.to(context.dtype), materialize_grads=True)
    return dict(zip(("q", "k", "v"), found, strict=True))


def draw_slope(context: Tensor) -> Tensor:
    """Return a seeded gradient of the context, in float64."""
    draw = torch.Generator().manual_seed(17)
    return torch.randn(context.shape, generator=draw, dtype=torch.float64).to(context.device)


def check_gradients(
    found: Mapping[str, Tensor], exact: AttentionFormula, plain: AttentionFormula, slope: Tensor, where: str
) -> Iterator[Finding]:
    """Yield the finding of each gradient that differs from the formula's."""
    expected, rough = exact.compute_gradients(slope), plain.compute_gradients(slope)
    largest = max(float(one.abs().max()) for one in expected.values())
    allowed = {name: get_allowed_error(one, rough[name], largest) for name, one in expected.items()}
    for name, right in expected.items():
        wrong = found.get(name)
        if wrong is not None and wrong.shape == right.shape and measure_error(wrong, right) <= allowed[name]:
            continue
        does = "there is none" if wrong is None else name_mistake(name, wrong, exact, slope, expected)
        sentence = f"with {where} the gradient of {name} is wrong: {does}"
        yield Finding(
            "wrong gradient", sentence, f"Compute {LINE}, where dc is the gradient of the context.", 1.4, f"gradient {name}"
        )


def name_mistake(name: str, wrong: Tensor, exact: AttentionFormula, slope: Tensor, expected: Mapping[str, Tensor]) -> str:
    """Return what is wrong with a gradient, in words."""
    right = expected[name]
    if wrong.shape != right.shape:
        h = exact.q.shape[1]
        has_unsummed_heads = name != "q" and wrong.shape == (right.shape[0], h, *right.shape[2:])
        return f"its shape is {tuple(wrong.shape)}, not {tuple(right.shape)}" + (
            ": the heads that share a key head are not summed" if has_unsummed_heads else ""
        )
    wrong = wrong.double()
    if not wrong.isfinite().all():
        where = "in rows that see nothing" if exact.blind.any() else "though the context is finite"
        return f"it is NaN {where}"
    factor = float((wrong * right).sum() / right.square().sum())
    if factor and measure_error(wrong, factor * right) < NEAR * abs(factor) * float(right.abs().max()):
        return describe_factor(factor, exact)
    for does, gradient in list_mistakes(name, exact, slope, expected):
        if gradient.shape == right.shape and measure_error(wrong, gradient) < NEAR * max(float(gradient.abs().max()), 1e-9):
            return does
    return f"it differs by {measure_error(wrong, right):.2g}, with numbers up to {float(right.abs().max()):.2g}"


def describe_factor(factor: float, exact: AttentionFormula) -> str:
    """Return what a gradient that is a multiple of the right one lacks."""
    repeats = exact.q.shape[1] // exact.k.shape[1]
    known = {
        f"the scale, {exact.scale:.4g}, is missing": 1 / exact.scale,
        f"it is multiplied by the scale, {exact.scale:.4g}, twice": exact.scale,
        "its sign is turned": -1.0,
        "a factor ln 2 = 0.6931 of exp2 is left in it": math.log(2),
        "a factor log2(e) = 1.4427 is left in it": 1 / math.log(2),
        "the heads that share a key head are averaged, not summed": 1 / repeats,
    }
    times = f"it is {factor:.4g} times the right one"
    return next((f"{times}: {does}" for does, one in known.items() if one != 1 and abs(factor / one - 1) < NEAR), times)


def list_mistakes(
    name: str, exact: AttentionFormula, slope: Tensor, expected: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield what known mistakes give for a gradient, in words and numbers."""
    h, g = exact.q.shape[1], exact.k.shape[1]
    k, v = share(exact.k, h), share(exact.v, h)
    slopes = slope @ v.mT
    plain = exact.weights * slopes * exact.scale  # without the sum of each row
    delta = (exact.weights * slopes).sum(-1, keepdim=True)
    scores = exact.weights * (slopes - delta) * exact.scale

    def sum_groups(x: Tensor) -> Tensor:
        groups: Tensor = x.unflatten(1, (g, h // g)).sum(2)
        return groups

    if name == "q":
        yield "the sum of each row, delta = rowsum(dp p), is not subtracted", plain @ k
        yield "the sum of each row, delta, is added, not subtracted", exact.weights * (slopes + delta) * exact.scale @ k
    if name == "k":
        yield "the sum of each row, delta = rowsum(dp p), is not subtracted", sum_groups(plain.mT @ exact.q)
        yield "only the first of the heads that share a key head counts", (scores.mT @ exact.q)[:, :: h // g]
        yield "only the last of the heads that share a key head counts", (scores.mT @ exact.q)[:, h // g - 1 :: h // g]
    if name == "v":
        yield "only the first of the heads that share a key head counts", (exact.weights.mT @ slope)[:, :: h // g]
        yield "the weights include hidden keys", sum_groups(exact.scaled.softmax(-1).mT @ slope)
    others = {other: one for other, one in expected.items() if other != name}
    yield from ((f"it is the gradient of {other}", one) for other, one in others.items())
    if not exact.seen.all():
        every = replace(exact, seen=torch.ones_like(exact.seen))
        yield "hidden keys count in it", every.compute_gradients(slope)[name]


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
    wrong = describe_rate(found, rate, error) or describe_dropout_factor(factor, rate)
    if wrong is None and rate and has_equal_heads(dropped, large):
        wrong = "every head drops the same weights", "Draw other numbers for each head and each sequence."
    if wrong is not None:
        yield Finding("wrong dropout", f"{wrong[0]}, at a rate of {rate:g}", wrong[1], 1.4, "dropout")
    else:
        yield Checked(
            DROPPED, f"{found:.3f} of {int(large.sum()):,} weights dropped, and the others multiplied by {factor:.4g}"
        )


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


def describe_dropout_factor(factor: float, rate: float) -> tuple[str, str] | None:
    """Return what is wrong with the factor on weights that are kept, and the cure."""
    if abs(factor * (1 - rate) - 1) < NEAR_FACTOR:
        return None
    cure = f"Divide the weights that are kept by 1 - rate = {1 - rate:g}, and do not sum a row again after dropout."
    why = {"they are not divided by 1 - rate": 1.0, "they are divided by the rate": 1 / max(rate, 1e-9)}
    does = next((f": {does}" for does, one in why.items() if abs(factor / one - 1) < NEAR_FACTOR), "")
    return f"the weights that are kept are multiplied by {factor:.4g}, not by {1 / (1 - rate):.4g}{does}", cure


def has_equal_heads(dropped: Tensor, large: Tensor) -> bool:
    """Return whether all heads, or all sequences, drop the same weights."""
    both = large.all(1, keepdim=True) if dropped.shape[1] > 1 else large[:, :0]
    heads = bool(both.any()) and bool(((dropped == dropped[:, :1]) | ~both).all())
    rows = large.all(0, keepdim=True) if len(dropped) > 1 else large[:0]
    return heads or (bool(rows.any()) and bool(((dropped == dropped[:1]) | ~rows).all()))
