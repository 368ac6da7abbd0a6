"""Check that no number inside is rounded to fewer bits than the subject's own, and that its error is that of a right layer."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from regard.examination.case import Case, copy_subject_as_double, join_context_heads, use_constants_of
from regard.examination.probes import routed
from regard.examination.report import Checked, Finding, Unknown

STEPS, CURVED = (4e-3, 5e-4), 10.0  # of an input; the most that a smooth output bends, per step and relative to its change
SHAKES = 2  # how often inputs and weights are perturbed by a rounding, before an error is too large
TIMES = 100.0  # times that effect bounds a right layer's error: the most of a hundred was 16, and it grows with the width
HALF_TIMES = 4.0  # in half precision, where sums are kept in float32: the most was 2.4
NEAR, SMOOTH = 0.02, 0.3  # how far near inputs are, and how far their errors are apart if they are not rounding
DRAWS = 8  # further inputs, in the median of which an error must be too large
LONG = 300  # tokens: more than 256, where a sum of ones in bfloat16 stops growing
INSIDE = "Compute in the dtype of the input, scores and softmax at least in float32: torch.softmax(scores.float(), dim=-1)."
SUMS = "Accumulate in float32 and round once, at the end, as torch.softmax and @ do."


def check_case(case: Case) -> Iterator[Finding | Checked | Unknown]:
    """Check for steps in a smooth function, and for an error beyond what rounding inputs and weights causes."""
    exact = case.double
    if exact is None:
        needs = "a layer that copy.deepcopy can copy and that runs in float64 after .double()"
        yield Unknown(f"whether intermediate results are rounded: {case.narrow}", needs)
        return
    step, bend = max(measure_bending(exact).items(), key=lambda one: one[1] / one[0])
    if bend > CURVED * step and not routed.record_routing(lambda: exact.run_subject(*exact.make_usual_inputs(40))).names:
        evidence = f"in float64, for an input step of {step:g}, outputs are off a straight line by {bend:.2g} of their change"
        yield Finding(
            "wrong precision", f"{evidence}; intermediate results are rounded to fewer bits", INSIDE, 1.0, "precision"
        )
        return
    if exact is case:
        yield Checked(
            "intermediate results are not rounded to fewer bits",
            f"for an input step of {step:g}, outputs are off a straight line by {bend:.0e} of their change",
        )
        return
    yield from check_error(case, exact)


def measure_bending(case: Case) -> dict[float, float]:
    """Return, for each step, how far outputs half way are from the middle, relative to how far they go: the median row."""
    bends: dict[float, list[Tensor]] = {step: [] for step in STEPS}
    for seed in range(3):
        inputs, along = case.make_usual_inputs(40 + seed), case.make_usual_inputs(50 + seed)
        middle = case.compute_seeded_context(*inputs).double()
        for step in STEPS:
            first, last = (
                case.compute_seeded_context(*(x + n * step * d for x, d in zip(inputs, along, strict=True))).double()
                for n in (-1, 1)
            )
            distance = (last - first).abs().amax(-1)
            bends[step].append(((last + first - 2 * middle).abs().amax(-1) / distance)[distance > 0])
    return {step: compute_finite_median(torch.cat(rows)) for step, rows in bends.items()}


def compute_finite_median(numbers: Tensor) -> float:
    """Return the median of the finite numbers; 0 if there are none."""
    finite = numbers[numbers.isfinite()]
    return float(finite.median()) if len(finite) else 0.0


def check_error(case: Case, exact: Case) -> Iterator[Finding | Checked | Unknown]:
    """Compare the error with the budget, for usual and for longer inputs."""
    runs = list(run_inputs(case))
    dtype = get_coarser_dtype(case.subject.dtype, runs[0].context.dtype)
    bits = str(dtype).removeprefix("torch.")
    times = HALF_TIMES if torch.finfo(dtype).bits == 16 else TIMES
    shares = measure_shares(case, exact, runs, torch.finfo(dtype).eps, times)
    if shares and max(shares)[0] > times:  # or the code takes a constant, such as an eps, from the dtype
        with use_constants_of(case.subject.dtype):
            again = measure_shares(case, exact, runs, torch.finfo(dtype).eps, times)
        shares = min(shares, again or shares, key=lambda found: max(found)[0])
    if not shares:
        return
    share, error, budget, t = max(shares)
    if share > times:  # a few rows can be off by chance
        more = [ProbeRun(x, case.compute_seeded_context(*x)) for x in draw_more_inputs(case, t)]
        again = sorted([*measure_shares(case, exact, more, torch.finfo(dtype).eps, times), (share, error, budget, t)])
        share, error, budget, t = again[len(again) // 2]
    if share > times and differs_smoothly(case, exact, next(one.inputs for one in runs if one.tokens == t)):
        needs = "a layer whose constants are the same in all dtypes"
        yield Unknown(
            f"whether intermediate results are rounded: a constant in it is not the same in {bits} and float64", needs
        )
    elif share > times:
        evidence = f"with {t} tokens, outputs in {bits} differ from float64 by {error:.2g} of the largest"
        yield Finding(
            "wrong precision", f"{evidence}; rounding inputs and weights changes them by {budget:.1g}", SUMS, 1.0, "precision"
        )
    else:
        evidence = (
            f"with {t} tokens, {share:.2g} times the effect of rounding inputs and weights; {times:g} times would be detected"
        )
        yield Checked(f"the error in {bits} is that of a correct layer", evidence)


class ProbeRun(NamedTuple):
    """Inputs of a subject, and its context (b, t, c)."""

    inputs: tuple[Tensor, ...]
    context: Tensor

    @property
    def tokens(self) -> int:
        """The number of keys."""
        return self.inputs[-1].shape[-2]


def run_inputs(case: Case) -> Iterator[ProbeRun]:
    """Yield the runs of usual inputs, and of one sequence of LONG tokens if the subject takes it."""
    usual = case.make_usual_inputs(60)
    yield ProbeRun(usual, case.compute_seeded_context(*usual))
    if not case.can_resize or case.shapes.gap or (case.shapes.most or LONG) < LONG:
        return
    try:
        inputs = case.make_inputs(LONG, 1, 61)
        context = case.compute_seeded_context(*inputs)
    except Exception:  # refusing another length is allowed
        return
    if context.shape[-2] == LONG:
        yield ProbeRun(inputs, context)


def draw_more_inputs(case: Case, tokens: int) -> Iterator[tuple[Tensor, ...]]:
    """Yield further inputs of usual length, or of one sequence of LONG tokens."""
    for seed in range(62, 62 + DRAWS):
        usual = case.make_usual_inputs(seed)
        yield usual if usual[-1].shape[-2] == tokens else case.make_inputs(tokens, 1, seed)


def get_coarser_dtype(subject_dtype: torch.dtype, output_dtype: torch.dtype) -> torch.dtype:
    """Return the coarser of the subject's dtype and that of its output, which differ under torch.autocast."""
    return (
        output_dtype
        if output_dtype.is_floating_point and torch.finfo(output_dtype).eps > torch.finfo(subject_dtype).eps
        else subject_dtype
    )


def differs_smoothly(case: Case, exact: Case, inputs: tuple[Tensor, ...]) -> bool:
    """Return whether outputs differ from float64 alike for near inputs, as by an eps of the dtype, and not by rounding."""
    draw = torch.Generator().manual_seed(71)
    near = tuple(x * (1 + NEAR * torch.randn(x.shape, generator=draw, dtype=torch.float64)).to(x) for x in inputs)
    errors = [
        case.compute_seeded_context(*some).double() - exact.compute_seeded_context(*(x.double() for x in some)).double()
        for some in (inputs, near)
    ]
    return float((errors[1] - errors[0]).abs().nan_to_num().median()) < SMOOTH * float(errors[0].abs().nan_to_num().median())


def measure_shares(
    case: Case, exact: Case, runs: Sequence[ProbeRun], eps: float, times: float
) -> list[tuple[float, float, float, int]]:
    """Return the error relative to its budget, the error, the budget and the number of tokens of each run.

    The budget is how far outputs move if inputs and weights are rounded, at the most of several times while an error is more
    than `times` as large. Runs without a budget are left out.
    """
    double_inputs = [tuple(x.double() for x in one.inputs) for one in runs]
    exact_outputs = [exact.compute_seeded_context(*inputs).double() for inputs in double_inputs]
    errors = [
        measure_distance(one.context.double(), exact_output) for one, exact_output in zip(runs, exact_outputs, strict=True)
    ]
    budgets = [0.0] * len(runs)
    for seed in range(SHAKES):
        perturbed_outputs = compute_perturbed_outputs(case, exact, double_inputs, eps, seed)
        budgets = [
            max(before, measure_distance(*pair))
            for before, *pair in zip(budgets, perturbed_outputs, exact_outputs, strict=True)
        ]
        if all(error <= times * budget for error, budget in zip(errors, budgets, strict=True)):
            break  # a larger budget changes nothing
    parts = zip(errors, budgets, runs, strict=True)
    return [(error / budget, error, budget, one.tokens) for error, budget, one in parts if budget > 0]


def measure_distance(context: Tensor, right: Tensor) -> float:
    """Return how far outputs are apart, relative to the largest number: the median over rows of the later half."""
    half = right.shape[1] // 2
    top = float(right.abs().nan_to_num().max())
    return compute_finite_median((context - right)[:, half:].abs().amax(-1).flatten()) / top if top > 0 else 0.0


def compute_perturbed_outputs(
    case: Case, exact: Case, inputs: Sequence[tuple[Tensor, ...]], eps: float, seed: int
) -> list[Tensor]:
    """Compute outputs (b, t, c) in float64 of inputs and weights that are each moved by up to half a rounding."""
    subject, call, draw = case.subject, exact.subject.call, torch.Generator().manual_seed(70 + seed)
    perturbed_module = copy_subject_as_double(subject)
    if perturbed_module is not None and subject.again is not None:
        with torch.no_grad():
            for weight in perturbed_module.parameters():
                if weight.is_floating_point():
                    weight.mul_(draw_factors(weight, eps, draw))
        call = subject.again(perturbed_module)
    outputs = []
    for one in inputs:
        draw_inputs = draw.clone_state()  # the same numbers whatever other inputs there are
        with torch.no_grad():  # some kernels refuse weights that require a gradient, as flex_attention does on a CPU
            context = call(*(x * draw_factors(x, eps, draw_inputs) for x in one)).context
        outputs.append(join_context_heads(context, subject.form).double())
    return outputs


def draw_factors(x: Tensor, eps: float, draw: torch.Generator) -> Tensor:
    """Draw a factor between 1 - eps / 2 and 1 + eps / 2 for each number, in float64."""
    return torch.rand(x.shape, generator=draw).double().sub_(0.5).mul_(eps).add_(1.0).to(x.device)
