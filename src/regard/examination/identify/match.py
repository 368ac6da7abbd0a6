"""Find the variant that gives a subject's outputs: the right one first, then single deviations, then pairs of them."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard.examination.case import Case
from regard.examination.identify.family import RIGHT
from regard.examination.identify.projections import Layout, crowded
from regard.examination.identify.trial import Target, Trial, aim, as_given, projected, tried
from regard.examination.identify.variants import Projected, Variant, scale_of

SPREAD = 1.5  # of the scaled scores: every variant differs, and no weight underflows
CLOSE = {torch.float64: 2e-6, torch.float32: 2e-4}  # of the largest output; layers may compute in float32 inside
LOOSE = 0.03  # in half precision
BUDGET, EACH = 40_000_000, 10_000  # numbers that all variants may compute, and a fixed cost of each
SCALES = torch.logspace(-3, 2, 41, dtype=torch.float64).tolist()  # times the expected scale, if no named scale fits
MEASURED = replace(RIGHT, mask="measured")
Fit = tuple[Trial, Variant]


@dataclass(frozen=True, eq=False)
class Match:
    """What a subject computes: `error` is the largest difference from its outputs, `right_error` that of the right formula.

    `alike` are the variants that give the same outputs, and so cannot be distinguished from this one.
    """

    variant: Variant
    layout: Layout
    heads: int
    groups: int
    width: int  # d, of each head
    scale: float  # the factor on the scores
    expected_scale: float
    error: float
    right_error: float
    alike: tuple[Variant, ...] = ()

    @property
    def right(self) -> bool:
        """Whether the match is attention, over whatever tokens it sees."""
        return not set(self.variant.deviations) - {"mask"} and self.variant.mask in ("hidden", "measured")

    def deviates(self, field: str) -> bool:
        """Return whether a field differs from what it should be."""
        return field in self.variant.deviations

    def clears(self, field: str) -> bool:
        """Return whether a field is as it should be, and a deviation in it would have been detected."""
        return not self.deviates(field) and not any(field in other.deviations for other in self.alike)


def identify(case: Case) -> Match | None:
    """Return what the subject computes, by its own parameters; None if no variant gives its outputs."""
    best = case.double or case
    try:
        size = fitting(best)
        target, other = aim(best, 0, size), aim(best, 1, 1.5 * size, shorter=True)
    except Exception:  # whatever a user's layer raises: another probe reports it
        return None
    close = CLOSE.get(best.subject.dtype, LOOSE)
    found = judged(rights(best, target), other, close)
    if found is not None:
        return found
    if case.subject.module is not None and crowded(case.subject.module, target.inputs[0].shape[-1]):
        return None
    measured = seen_by(case)
    if measured is not None:
        target = replace(target, measured=measured)
        other = aim(best, 1, 1.5 * size, measured=measured)
    trials = list(tried(best, target, plain=True))
    left = Budget(BUDGET)
    passes = (ones(trials, left), rescaled(trials, left, RIGHT), twos(trials, left), rescaled(trials, left, MEASURED))
    return next((found for some in passes if (found := judged(some, other, close)) is not None), None)


class Budget:
    """The work that may still be done, in numbers computed: the same on every machine, so no verdict depends on its speed."""

    def __init__(self, numbers: float) -> None:
        self.left = numbers

    def spend(self, trial: Trial) -> bool:
        """Deduct the cost of one variant of a trial, and return whether the budget allows it."""
        given = trial.given
        scores = len(given.q) * given.heads * given.seen.shape[-2] * given.seen.shape[-1]
        self.left -= EACH + given.q.numel() + 2 * scores
        return self.left > 0


def rights(case: Case, target: Target) -> Iterator[Fit]:
    """Yield the right formula in the usual layouts, and then in every other."""
    for usual in (True, False):
        for trial in tried(case, target, plain=usual):
            if usual or not trial.layout.plain:
                yield trial, RIGHT


def fitting(case: Case) -> float:
    """Return the size of inputs that gives scores the standard deviation SPREAD in the likeliest layout; 1 without a layout."""
    trial = next(tried(case, aim(case, 0, 1.0), plain=True), None)
    if trial is None:
        return 1.0
    q, k = (x.unflatten(-1, (n, -1)) for x, n in ((trial.given.q, trial.given.heads), (trial.given.k, trial.given.groups)))
    spread = float((q[:, :, None, 0] * k[:, None, :, 0]).sum(-1).std()) * trial.given.width**-0.5
    return min(max(math.sqrt(SPREAD / spread), 1e-3), 1e3) if spread > 0 and math.isfinite(spread) else 1.0


def seen_by(case: Case) -> Tensor | None:
    """Return who was measured to see whom, (b, 1, q, k); None if that is what the rule says, or was not measured in full."""
    found, expected = case.reach.found, case.expected(*case.usual()).cpu()
    return None if torch.equal(found, expected) or not case.reach.measured.all() else found.unsqueeze(1)


def judged(candidates: Iterable[Fit], other: Target, close: float) -> Match | None:
    """Return the match of the first candidate that also fits other inputs; rivals that fit as well are listed as `alike`."""
    first = next(lasting(candidates, other, close), None)
    if first is None:
        return None
    trial, variant = first
    given, right = trial.given, MEASURED if variant.mask == "measured" else RIGHT
    rivals = ((trial, one) for one in (RIGHT, *trial.singles()) if one != variant)
    alike = tuple(one for _, one in lasting(rivals, other, close) if not same_number(one, given))
    return Match(
        *(variant, trial.layout, given.heads, given.groups, given.width, scale_of(variant, given), given.scale),
        *(trial.difference(variant), trial.difference(right), alike),
    )


def same_number(variant: Variant, given: Projected) -> bool:
    """Return whether a variant only has another name for the right scale at this length: 1 / √t, where t is d."""
    return set(variant.deviations) == {"scale"} and scale_of(variant, given) == given.scale and variant.scale != "after"


def lasting(candidates: Iterable[Fit], other: Target, close: float) -> Iterator[Fit]:
    """Yield the candidates that fit, and fit other inputs as well."""
    for trial, variant in candidates:
        if trial.error(variant) < close:
            again = again_on(trial, other)
            if again is not None and again.error(variant) < close:
                yield trial, variant


def again_on(trial: Trial, other: Target) -> Trial | None:
    """Return the trial of the same layout and heads on other inputs."""
    return as_given(other) if len(other.inputs) == 3 else projected(trial.layout, trial.given.heads, other)


def ones(trials: Sequence[Trial], left: Budget) -> Iterator[Fit]:
    """Yield single deviations, within the budget."""
    every = ((trial, variant) for trial in trials for variant in trial.singles())
    return itertools.takewhile(lambda fit: left.spend(fit[0]), every)


def rescaled(trials: Sequence[Trial], left: Budget, base: Variant) -> Iterator[Fit]:
    """Yield a variant with the scale that fits best, whatever it is."""
    for trial in trials:
        if (base == RIGHT or trial.given.measured is not None) and all(left.spend(trial) for _ in SCALES):
            scale = nearest(trial, base)
            if scale is not None:
                yield trial, replace(base, scale=scale)


def nearest(trial: Trial, base: Variant) -> float | None:
    """Find the scale that comes closest to the outputs, by a grid and then by golden section; None if none comes near."""
    scales = [trial.given.scale * times for times in SCALES]
    errors = [trial.error(replace(base, scale=scale)) for scale in scales]
    best = min(range(len(scales)), key=errors.__getitem__)
    if not errors[best] < 0.5 or best in (0, len(scales) - 1):
        return None
    low, high = math.log(scales[best - 1]), math.log(scales[best + 1])
    for _ in range(60):
        third = (high - low) * 0.381966
        left, right = (trial.error(replace(base, scale=math.exp(at))) for at in (low + third, high - third))
        low, high = (low, high - third) if left < right else (low + third, high)
    return math.exp((low + high) / 2)


def twos(trials: Sequence[Trial], left: Budget) -> Iterator[Fit]:
    """Yield pairs of deviations, within the budget."""
    every = ((trial, variant) for trial in trials for variant in trial.pairs())
    return itertools.takewhile(lambda fit: left.spend(fit[0]), every)
