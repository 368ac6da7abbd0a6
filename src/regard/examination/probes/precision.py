"""Check that no number inside is rounded to fewer bits than the subject's own, and that its error is that of a right layer."""

from collections.abc import Iterator

import torch
from torch import Tensor

from regard.examination import routing
from regard.examination.case import Case, copy_subject_as_double, join_context_heads
from regard.examination.dtype_constants import use_constants_of
from regard.examination.report import Checked, Finding, Unknown

STEPS, CURVED = (4e-3, 5e-4), 10.0  # of an input; the most that a smooth output bends, per step and relative to its change
SHAKES = 2  # how often inputs and weights are perturbed by a rounding
TIMES = 100.0  # times that effect bounds a right layer's error: the most of a hundred was 16, and it grows with the width
HALF_TIMES = 4.0  # in half precision, where sums are kept in float32: the most was 2.4
NEAR, SMOOTH = 0.02, 0.3  # how far near inputs are, and how far their errors are apart if they are not rounding
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
    step, bend = max(((step, measure_bending(exact, step)) for step in STEPS), key=lambda one: one[1] / one[0])
    if bend > CURVED * step and not routing.record_routing(lambda: exact.run_subject(*exact.make_usual_inputs(40))).names:
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


def measure_bending(case: Case, step: float) -> float:
    """Return how far outputs half way are from the middle, relative to how far they go in all; the median over rows."""
    bends = []
    for seed in range(3):
        inputs, along = case.make_usual_inputs(40 + seed), case.make_usual_inputs(50 + seed)
        at = [
            case.compute_seeded_context(*(x + n * step * d for x, d in zip(inputs, along, strict=True))).double()
            for n in (-1, 0, 1)
        ]
        gone = (at[2] - at[0]).abs().amax(-1)
        bends.append(((at[2] + at[0] - 2 * at[1]).abs().amax(-1) / gone)[gone > 0])
    rows = torch.cat(bends)
    rows = rows[rows.isfinite()]
    return float(rows.median()) if len(rows) else 0.0


def check_error(case: Case, exact: Case) -> Iterator[Finding | Checked | Unknown]:
    """Compare the error with the budget, for usual and for longer inputs."""
    dtype = get_coarser_dtype(case)
    bits = str(dtype).removeprefix("torch.")
    times = HALF_TIMES if torch.finfo(dtype).bits == 16 else TIMES
    shares = measure_shares(case, exact, dtype)
    if shares and max(shares)[0] > times:  # or the code takes a constant, such as an eps, from the dtype
        with use_constants_of(case.subject.dtype):
            shares = min(shares, measure_shares(case, exact, dtype) or shares, key=lambda found: max(found)[0])
    if not shares:
        return
    share, error, budget, t = max(shares)
    if share > times and differs_smoothly(case, exact, t):
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


def differs_smoothly(case: Case, exact: Case, t: int) -> bool:
    """Return whether outputs differ from float64 alike for near inputs, as by an eps of the dtype, and not by rounding."""
    inputs = next(one for one in iterate_inputs(case) if one[-1].shape[-2] == t)
    draw = torch.Generator().manual_seed(71)
    near = tuple(x * (1 + NEAR * torch.randn(x.shape, generator=draw, dtype=torch.float64)).to(x) for x in inputs)
    errors = [
        case.compute_seeded_context(*some).double() - exact.compute_seeded_context(*(x.double() for x in some)).double()
        for some in (inputs, near)
    ]
    return float((errors[1] - errors[0]).abs().nan_to_num().median()) < SMOOTH * float(errors[0].abs().nan_to_num().median())


def measure_shares(case: Case, exact: Case, dtype: torch.dtype) -> list[tuple[float, float, float, int]]:
    """Return the error relative to its budget, the error, the budget and the number of tokens, of usual and longer inputs."""
    found = [measure_error(case, exact, inputs, dtype) for inputs in iterate_inputs(case)]
    return [(error / budget, error, budget, t) for error, budget, t in found if budget > 0]


def get_coarser_dtype(case: Case) -> torch.dtype:
    """Return the coarser of the subject's dtype and that of its output, which differ under torch.autocast."""
    given, made = case.subject.dtype, case.run_subject(*case.make_usual_inputs(60)).context.dtype
    return made if made.is_floating_point and torch.finfo(made).eps > torch.finfo(given).eps else given


def iterate_inputs(case: Case) -> Iterator[tuple[Tensor, ...]]:
    """Yield usual inputs, and one sequence of LONG tokens if the subject takes it."""
    yield case.make_usual_inputs(60)
    if not case.can_resize or case.shapes.gap or (case.shapes.most or LONG) < LONG:
        return
    try:
        inputs = case.make_inputs(LONG, 1, 61)
        whole = case.run_subject(*inputs).context.shape[-2] == LONG
    except Exception:  # refusing another length is allowed
        return
    if whole:
        yield inputs


def measure_error(case: Case, exact: Case, inputs: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[float, float, int]:
    """Return the error, how far outputs move if inputs and weights are rounded, and the number of tokens."""
    wide = tuple(x.double() for x in inputs)
    right = exact.compute_seeded_context(*wide).double()
    error = measure_distance(case.compute_seeded_context(*inputs).double(), right)
    eps = torch.finfo(dtype).eps
    budget = max(measure_distance(compute_perturbed_outputs(case, exact, wide, eps, seed), right) for seed in range(SHAKES))
    return error, budget, inputs[-1].shape[-2]


def measure_distance(context: Tensor, right: Tensor) -> float:
    """Return how far outputs are apart, relative to the largest number: the median over rows of the later half."""
    half = right.shape[1] // 2
    rows = (context - right)[:, half:].abs().amax(-1).flatten()
    top = float(right.abs().nan_to_num().max())
    rows = rows[rows.isfinite()]
    return float(rows.median()) / top if len(rows) and top > 0 else 0.0


def compute_perturbed_outputs(case: Case, exact: Case, inputs: tuple[Tensor, ...], eps: float, seed: int) -> Tensor:
    """Compute outputs in float64 of inputs and weights that are each moved by up to half a rounding."""
    draw = torch.Generator().manual_seed(70 + seed)

    def perturb_tensor(x: Tensor) -> Tensor:
        noise = torch.rand(x.shape, generator=draw, dtype=torch.float64).to(x.device) - 0.5
        return x * (1 + eps * noise)

    subject, call = case.subject, exact.subject.call
    other = copy_subject_as_double(subject)
    if other is not None and subject.again is not None:
        with torch.no_grad():
            for weight in other.parameters():
                weight.copy_(perturb_tensor(weight))
        call = subject.again(other)
    with torch.no_grad():  # some kernels refuse weights that require a gradient, as flex_attention does on a CPU
        return join_context_heads(call(*map(perturb_tensor, inputs)).context, subject.form).double()
