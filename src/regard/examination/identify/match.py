"""Find the variant that gives a subject's outputs: the right one first, then single deviations, then pairs of them."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard.examination.case import Case
from regard.examination.identify.projection_layouts import ProjectionLayout, has_extra_layers
from regard.examination.identify.trial import (
    Trial,
    TrialTarget,
    iterate_trials,
    make_function_trial,
    make_seeded_target,
    make_trial,
)
from regard.examination.identify.variants import (
    RIGHT,
    ProjectedInputs,
    Variant,
    get_scale,
    iterate_deviation_pairs,
    iterate_single_deviations,
)

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

    `alike` are the variants that give the same outputs, and so cannot be distinguished from this one. `input_size` is the size
    of inputs that gives scores of usual spread.
    """

    variant: Variant
    layout: ProjectionLayout
    heads: int
    groups: int
    width: int  # d, of each head
    scale: float  # the factor on the scores
    expected_scale: float
    error: float
    right_error: float
    input_size: float
    alike: tuple[Variant, ...] = ()

    @property
    def is_right(self) -> bool:
        """Whether the match is attention, over whatever tokens it sees, with a sink of 0 or none."""
        own = self.variant.norm == "plus one" or not self.has_deviation("norm")
        return own and not set(self.variant.deviations) - {"mask", "norm"} and self.variant.mask in ("hidden", "measured")

    def has_deviation(self, field: str) -> bool:
        """Return whether a field differs from what it should be."""
        return field in self.variant.deviations

    def is_verified(self, field: str) -> bool:
        """Return whether a field is as it should be, and a deviation in it would have been detected."""
        return not self.has_deviation(field) and not any(field in other.deviations for other in self.alike)


def identify_formula(case: Case) -> Match | None:
    """Return what the subject computes, by its own parameters; None if no variant gives its outputs."""
    best = case.double or case
    try:
        size = choose_input_size(best)
        target, other = make_seeded_target(best, 0, size), make_seeded_target(best, 1, 1.5 * size, shorter=True)
    except Exception:  # whatever a user's layer raises: another probe reports it
        return None
    close = CLOSE.get(best.subject.dtype, LOOSE)
    found = find_match(try_right_formula(best, target), other, close, size)
    if found is not None:
        return found
    if any(one.has_positions for one in case.inner_calls):
        return None  # rotary positions or a bias, which no variant has
    if case.subject.module is not None and has_extra_layers(case.subject.module, target.inputs[0].shape[-1]):
        return None
    measured = get_measured_visibility(case)
    if measured is not None:
        target = replace(target, measured=measured)
        other = make_seeded_target(best, 1, 1.5 * size, measured=measured)
    trials = list(iterate_trials(best, target, plain=True))
    left = Budget(BUDGET)
    passes = (
        try_single_deviations(trials, left),
        try_scales(trials, left, RIGHT),
        try_deviation_pairs(trials, left),
        try_scales(trials, left, MEASURED),
    )
    return next((found for some in passes if (found := find_match(some, other, close, size)) is not None), None)


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


def try_right_formula(case: Case, target: TrialTarget) -> Iterator[Fit]:
    """Yield the right formula in the usual layouts, and then in every other."""
    for usual in (True, False):
        for trial in iterate_trials(case, target, plain=usual):
            if usual or not trial.layout.plain:
                yield trial, RIGHT


def choose_input_size(case: Case) -> float:
    """Return the size of inputs that gives scores the standard deviation SPREAD in the likeliest layout; 1 without a layout."""
    trial = next(iterate_trials(case, make_seeded_target(case, 0, 1.0), plain=True), None)
    if trial is None:
        return 1.0
    q, k = (x.unflatten(-1, (n, -1)) for x, n in ((trial.given.q, trial.given.heads), (trial.given.k, trial.given.groups)))
    spread = float((q[:, :, None, 0] * k[:, None, :, 0]).sum(-1).std()) * trial.given.width**-0.5
    return min(max(math.sqrt(SPREAD / spread), 1e-3), 1e3) if spread > 0 and math.isfinite(spread) else 1.0


def get_measured_visibility(case: Case) -> Tensor | None:
    """Return who was measured to see whom, (b, 1, q, k); None if that is what the rule says, or was not measured in full."""
    found, expected = case.measured_dependency.visible, case.get_expected_visibility(*case.make_usual_inputs()).cpu()
    return None if torch.equal(found, expected) or not case.measured_dependency.measured_rows.all() else found.unsqueeze(1)


def find_match(candidates: Iterable[Fit], other: TrialTarget, close: float, size: float) -> Match | None:
    """Return the match of the first candidate that also fits other inputs; rivals that fit as well are listed as `alike`."""
    first = next(filter_fits(candidates, other, close), None)
    if first is None:
        return None
    trial, variant = first
    given, right = trial.given, MEASURED if variant.mask == "measured" else RIGHT
    rivals = ((trial, one) for one in (RIGHT, *iterate_single_deviations(trial.choices)) if one != variant)
    alike = tuple(one for _, one in filter_fits(rivals, other, close) if not is_same_scale(one, given))
    return Match(
        *(variant, trial.layout, given.heads, given.groups, given.width, get_scale(variant, given), given.scale),
        *(trial.compute_difference(variant), trial.compute_difference(right), size, alike),
    )


def is_same_scale(variant: Variant, given: ProjectedInputs) -> bool:
    """Return whether a variant only has another name for the right scale at this length: 1 / √t, where t is d."""
    is_before = variant.scale != "after" or given.width == 1  # a division by √1 after the softmax is none
    return set(variant.deviations) == {"scale"} and get_scale(variant, given) == given.scale and is_before


def filter_fits(candidates: Iterable[Fit], other: TrialTarget, close: float) -> Iterator[Fit]:
    """Yield the candidates that fit, and fit other inputs as well."""
    for trial, variant in candidates:
        if trial.compute_error(variant) < close:
            again = repeat_trial(trial, other)
            if again is not None and again.compute_error(variant) < close:
                yield trial, variant


def repeat_trial(trial: Trial, other: TrialTarget) -> Trial | None:
    """Return the trial of the same layout and heads on other inputs."""
    return make_function_trial(other) if len(other.inputs) == 3 else make_trial(trial.layout, trial.given.heads, other)


def try_single_deviations(trials: Sequence[Trial], left: Budget) -> Iterator[Fit]:
    """Yield single deviations, within the budget."""
    every = ((trial, variant) for trial in trials for variant in iterate_single_deviations(trial.choices))
    return itertools.takewhile(lambda fit: left.spend(fit[0]), every)


def try_scales(trials: Sequence[Trial], left: Budget, base: Variant) -> Iterator[Fit]:
    """Yield a variant with the scale that fits best, whatever it is."""
    for trial in trials:
        if (base == RIGHT or trial.given.measured is not None) and all(left.spend(trial) for _ in SCALES):
            scale = fit_scale(trial, base)
            if scale is not None:
                yield trial, replace(base, scale=scale)


def fit_scale(trial: Trial, base: Variant) -> float | None:
    """Find the scale that comes closest to the outputs, by a grid and then by golden section; None if none comes near."""
    scales = [trial.given.scale * times for times in SCALES]
    errors = [trial.compute_error(replace(base, scale=scale)) for scale in scales]
    best = min(range(len(scales)), key=errors.__getitem__)
    if not errors[best] < 0.5 or best in (0, len(scales) - 1):
        return None
    low, high = math.log(scales[best - 1]), math.log(scales[best + 1])
    for _ in range(60):
        third = (high - low) * 0.381966
        left, right = (trial.compute_error(replace(base, scale=math.exp(at))) for at in (low + third, high - third))
        low, high = (low, high - third) if left < right else (low + third, high)
    return math.exp((low + high) / 2)


def try_deviation_pairs(trials: Sequence[Trial], left: Budget) -> Iterator[Fit]:
    """Yield pairs of deviations, within the budget."""
    every = ((trial, variant) for trial in trials for variant in iterate_deviation_pairs(trial.choices))
    return itertools.takewhile(lambda fit: left.spend(fit[0]), every)
