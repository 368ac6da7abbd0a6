"""Lengths: shorter and longer inputs follow the same rule, where the subject takes them."""

from collections.abc import Iterator

import torch
from torch import Tensor

from regard.examination import inputs as shapes
from regard.examination import reach, rules
from regard.examination.case import Case
from regard.examination.report import Checked, Finding, Unknown
from regard.examination.untouched import seeded

LONGEST, SHORT = 1100, 64  # tokens
CURE = "Make the mask for the tokens that came: mask[:t, :t] of one that is long enough, or a new one for each length."


def look(case: Case) -> Iterator[Finding | Checked | Unknown]:
    """A leak or a blind row at another length than the usual."""
    if not case.free or case.shapes.gap:
        return
    taken: list[int] = []
    refused: list[int] = []
    for t in others(case):
        wrong = judged(case, t)
        if isinstance(wrong, Finding):
            yield wrong
            return
        (taken if wrong else refused).append(t)
    if taken:
        told = f"; it refuses {', '.join(map(str, refused))}" if refused else ""
        plural = "s" * (taken != [1])
        yield Checked(
            "shorter and longer inputs follow the same rule", f"with {', '.join(map(str, taken))} token{plural}{told}"
        )


def others(case: Case) -> list[int]:
    """Other lengths that are worth a trial: few tokens, and more than the masks in a module are made for."""
    usual = case.shapes.tokens
    made = [t for t in shapes.lengths_of(case.subject.module, case.shapes.width) if t < LONGEST]
    wanted = {1, 2, usual - 1, 2 * usual + 1, *(t for t in made if t <= SHORT), *(t + 1 for t in made)} - {usual}
    return sorted(t for t in wanted if 0 < t <= (case.shapes.most or LONGEST))


def judged(case: Case, t: int) -> Finding | bool:
    """What is wrong with t tokens; True where nothing is, False where the subject refuses them."""
    inputs = case.inputs(t, b=2 if t <= SHORT else 1)
    try:
        context = answer(case, inputs)
    except Exception:  # refusing another shape is no fault
        return False
    if context.shape[:2] != (len(inputs[0]), t):
        return False
    expected = case.expected(*inputs)
    broken = ~context.isfinite().all(-1) & expected.any(-1)
    if broken.any() and answer(case, case.usual()).isfinite().all():
        rows = int(broken[0].int().argmax()) if broken[0].any() else 0
        return Finding(
            "blind row",
            f"with {t} token{'s' * (t > 1)} row {rows} is not finite, though it may see {int(expected[0, rows].sum())}",
            CURE,
            0.9,
            "length",
        )
    changed = (t - 1, t // 2, 0) if t <= SHORT else (t - 1,)
    return next((one for j in changed if (one := leak(case, inputs, context, j)) is not None), True)


def answer(case: Case, inputs: tuple[Tensor, ...]) -> Tensor:
    """The context (b, t, c); where something is drawn, the same again."""
    seeded(0, case.subject.device)
    with torch.no_grad():
        return case.context(*inputs).cpu()


def leak(case: Case, inputs: tuple[Tensor, ...], context: Tensor, j: int) -> Finding | None:
    """The first output that moves with token j of the first sequence and may not."""
    t = inputs[0].shape[-2]
    other = case.inputs(t, len(inputs[0]), seed=104)
    moved = (answer(case, reach.replaced(inputs, other, 0, j)) - context).double().abs().amax(-1)  # (b, t)
    hidden = ~case.expected(*inputs)[..., j]
    hidden[1:] = case.subject.batched
    if case.subject.form == "x":
        hidden[0, j] = False  # what passes on a token's own value beside attention
    leaking = hidden & (moved > reach.rounding(context.dtype) * context.double().abs().amax(-1))
    if not leaking.any():
        return None
    b, i = (int(n) for n in leaking.nonzero()[0])
    whose = f"{i} of another sequence" if b else f"{i}"
    told = f"with {t} token{'s' * (t > 1)} changing token {j} moves output {whose} by {moved[b, i]:.2g}"
    if b:
        return Finding("batch leak", told, CURE, 0.7, "batch")
    kind = "future leak" if rules.later(t, t, case.offset)[i, j] else "wrong mask"
    return Finding(kind, f"{told}, which may not see it", CURE, 0.7, "mask")
