"""Check that scores of thousands give finite outputs, and that what is hidden from a query stays hidden."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from regard.examination import dependency, evidence, mask_requirements
from regard.examination.call_reading.inner_calls import record_inner_calls
from regard.examination.case import Case
from regard.examination.identify.affine import is_norm
from regard.examination.identify.trial import make_function_trial, make_seeded_target, make_trial
from regard.examination.probes.gradient import format_names
from regard.examination.report import Checked, Finding, Unknown

SCORES, HALF = (1e2, 1e3, 1e4), (1e2,)  # half precision, and the products of a right layer in it, end at 65504
SIZES, HALF_SIZES = (4.0, 16.0, 64.0, 256.0), (4.0, 16.0)  # of inputs, if scores are not known
DRAWS, BUDGET = 256, 2**22  # sequences of inputs of the largest size; numbers that scores or activations of all may have
HEADS = 16  # where their number is not known
HIDDEN = 1e-3  # of an output, below which a change is rounding
STABLE = (
    "Subtract each row's maximum before exp, as torch.softmax does: weights = torch.softmax(scores, dim=-1). In half "
    "precision compute scores and softmax in float32."
)
LOWEST = (
    "Hide with scores.masked_fill(~mask, -torch.inf), or with torch.finfo(scores.dtype).min: visible scores can be below -1e4."
)


def check_case(case: Case) -> Iterator[Finding | Checked | Unknown]:
    """Find the first size of scores at which an output is not finite, or moves with a hidden token."""
    usual = case.usual_context.double().cpu()
    if not usual.isfinite().any():
        return
    leaks, size, sentence, growth = has_leak(case), 1.0, "", choose_growth(case)
    harmless: list[str] = []
    for size, sentence in choose_sizes(case, growth):
        with scale_weights(growth.weights, size):
            inputs = scale_inputs(case, 0, growth.get_input_size(size))
            try:
                context = case.compute_seeded_context(*inputs).double().cpu()
            except Exception:  # refusing large numbers is allowed
                return
            broken = usual.isfinite().all(-1) & ~context.isfinite().all(-1)
            unhidden = (
                None if leaks or broken.any() else describe_unhidden_token(case, inputs, context, growth.get_input_size(size))
            )
        if broken.any():
            b, i = (int(n) for n in broken.nonzero()[0])
            kind = "NaN" if context[b, i].isnan().any() else "inf"
            row = f"row {evidence.format_token(case, evidence.get_token_number(case, i))}"
            yield Finding("overflow", f"with {sentence}, {row} is {kind}", STABLE, 1.2, "overflow")
            return
        if unhidden is not None:
            below = f"; with {harmless[-1]} it stays hidden" if harmless else ""
            yield make_mask_finding(f"with {sentence}, {unhidden}", below)
            return
        harmless.append(sentence)
    with scale_weights(growth.weights, size):
        unhidden = None if leaks else draw_unhidden_token(case, growth.get_input_size(size))
    if unhidden is not None:
        yield make_mask_finding(f"with {sentence}, {unhidden}", "")
        return
    yield Checked(f"large scores give finite outputs{'' if leaks else ', and hidden keys stay hidden'}", f"with {sentence}")


def make_mask_finding(evidence: str, below: str) -> Finding:
    """Return the finding of a number for -inf that scores can fall below."""
    return Finding("overflow", f"{evidence}: the number used for -inf is not below them{below}", LOWEST, 1.1, "overflow")


def draw_unhidden_token(case: Case, size: float) -> str | None:
    """Describe an output that moves with the last token that is hidden from it, for one of many inputs; None if none does.

    A number for -inf counts where all visible scores of a query are below it, which few inputs need not show.
    """
    draws = count_draws(case)
    if not case.can_resize or draws < 2:
        return None
    inputs, other = (scale_inputs(case, seed, size, draws) for seed in (1, 100))
    expected = case.get_expected_visibility(*inputs).cpu()
    unseen = (~expected & expected.any(-1, keepdim=True))[0]  # (q, k)
    if case.subject.form == "x":
        unseen &= ~torch.eye(*unseen.shape, dtype=torch.bool)  # a residual passes on a token's own value
    if not unseen.any():
        return None
    j = int(unseen.any(0).nonzero()[-1])
    changed = dependency.replace_token(inputs, other, slice(None), j)
    try:
        context, moved = (case.compute_seeded_context(*x).double().cpu() for x in (inputs, changed))
        moves = ((moved - context).abs() > HIDDEN * context.abs()).any(-1) & unseen[:, j]  # (b, q)
        for b in moves.any(-1).nonzero().flatten().tolist():
            unhidden = describe_moved_output(case, inputs, other, context, unseen[:, j], (b, j))
            if unhidden is not None:
                return f"in one of {draws} sequences {unhidden}"
    except Exception:  # refusing another batch, or large numbers, is allowed
        return None
    return None


def count_draws(case: Case) -> int:
    """Return how many sequences to draw, so that neither their scores nor their activations exceed the budget."""
    x = case.make_usual_inputs()
    known = HEADS if case.match is None else case.match.heads
    scores = (x[0].shape[1] if case.subject.form == "qkv" else known) * x[0].shape[-2] * x[-1].shape[-2]
    return min(DRAWS, BUDGET // max(scores, *(one[0].numel() for one in x)))


@dataclass(frozen=True, eq=False)
class Growth:
    """What is made larger so that scores are: inputs, weights, or both; `what` names them."""

    what: str = "inputs"
    weights: tuple[Tensor, ...] = ()
    has_inputs: bool = True

    def get_input_size(self, size: float) -> float:
        """Return the factor on the inputs."""
        return size if self.has_inputs else 1.0


def choose_growth(case: Case) -> Growth:
    """Return what makes scores larger: inputs; after a norm of them the projections of queries and keys, as in training.

    Where those are not known, weights of norms and inputs.
    """
    module = case.subject.module
    if module is None or case.match is not None:
        return Growth()
    names = list_score_sources(case)
    if not names:
        norms = select_scalable(one for part in module.modules() if is_norm(part) for one in part.parameters())
        return Growth("inputs and weights of norms or other vectors", norms) if norms else Growth()
    if has_growing_scores(case, module):
        return Growth()
    weights = {name: one for own in names for name, one in select_module_weights(module, own).items()}
    if not weights:
        return Growth()
    return Growth(f"the weights of {format_names(list(weights))}", tuple(weights.values()), has_inputs=False)


def list_score_sources(case: Case) -> list[str]:
    """Return the names of the modules that queries and keys of recorded calls come from; empty if one is not known."""
    sources = [source for one in case.inner_calls for source in (one.q_source, one.k_source)]
    names = [source.name for source in sources if source is not None]
    return list(dict.fromkeys(names)) if len(names) == len(sources) else []


def has_growing_scores(case: Case, module: nn.Module) -> bool:
    """Return whether queries and keys grow with the inputs; True also where that cannot be measured."""
    usual, large = (measure_queries_and_keys(case, module, size) for size in (1.0, SIZES[0]))
    if usual is None or large is None:
        return True
    return any(q * k > SIZES[0] * usual_q * usual_k for (q, k), (usual_q, usual_k) in zip(large, usual, strict=False))


def measure_queries_and_keys(case: Case, module: nn.Module, input_size: float = 1.0) -> list[tuple[float, float]] | None:
    """Return the largest number of the queries and of the keys of each call, NaN if not read; None if the module raises."""
    inputs = scale_inputs(case, 0, input_size)
    try:
        calls = record_inner_calls(module, partial(case.subject.call, *inputs)).calls
    except Exception:  # refusing large numbers is allowed
        return None
    sizes = [(float(one.call.q.abs().max()), float(one.call.k.abs().max())) for one in calls]
    return [(math.nan, math.nan) if one.is_stored_as_weights else size for one, size in zip(calls, sizes, strict=True)]


def select_module_weights(module: nn.Module, own: str) -> dict[str, Tensor]:
    """Return the last weight, and its bias, of the module of this name: two matrices in a row would grow by the square."""
    every = {
        name: one for name, one in module.named_parameters() if f"{name}.".startswith(f"{own}.") and select_scalable([one])
    }
    last = next((name.removesuffix(".bias").removesuffix(".weight") for name in reversed(every)), "")
    return {name: one for name, one in every.items() if name.removesuffix(".bias").removesuffix(".weight") == last}


def select_scalable(weights: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Return the weights that can be multiplied in place."""
    return tuple(one for one in weights if one.is_floating_point() and not one.is_inference())


def choose_sizes(case: Case, growth: Growth) -> Iterator[tuple[float, str]]:
    """Yield factors on what grows, each with the scores that it gives in words."""
    half = torch.finfo(case.subject.dtype).max < 1e5
    usual = measure_usual_score(case)
    if usual is None:
        yield from ((size, f"{growth.what} {size:.0f} times as large") for size in (HALF_SIZES if half else SIZES))
        return
    power = 1 if case.subject.form == "qkv" else 2  # for a function, only the queries grow
    for score in HALF if half else SCORES:
        yield max(1.0, (score / usual) ** (1 / power)), f"scores of about {score:.0e}"


@contextmanager
def scale_weights(weights: Sequence[Tensor], size: float) -> Iterator[None]:
    """Multiply weights by size, and restore them."""
    usual = [one.detach().clone() for one in weights]
    try:
        with torch.no_grad():
            for one in weights:
                one.mul_(size)
        yield
    finally:
        with torch.no_grad():
            for one, before in zip(weights, usual, strict=True):
                one.copy_(before)


def measure_usual_score(case: Case) -> float | None:
    """Return the size of scores of usual inputs; None if q and k are not known."""
    best, match = case.double or case, case.match
    if case.subject.form != "qkv" and (match is None or (match.layout.q is None and match.layout.whole is None)):
        return None
    target = make_seeded_target(best, 0, 1.0)
    trial = make_function_trial(target) if case.subject.form == "qkv" else make_trial(match.layout, match.heads, target)
    if trial is None:
        return None
    q, k = (x.unflatten(-1, (n, -1)) for x, n in ((trial.given.q, trial.given.heads), (trial.given.k, trial.given.groups)))
    shared = k.repeat_interleave(trial.given.heads // trial.given.groups, 2)
    spread = float(torch.einsum("bihd,bjhd->bhij", q, shared).std()) * trial.given.scale
    return spread if spread > 0 and math.isfinite(spread) else None


def scale_inputs(case: Case, seed: int, size: float, b: int | None = None) -> tuple[Tensor, ...]:
    """Return inputs of the usual length, and of the usual batch or b, with x times size; of a function only the queries."""
    b = case.shapes.batch if b is None else b
    if case.subject.form == "qkv":
        q, k, v = case.make_inputs(None, b, seed)
        return q * size, k, v
    return case.make_inputs(None, b, seed, size)


def has_leak(case: Case) -> bool:
    """Return whether more is seen than may be with ordinary inputs already."""
    return bool((case.measured_dependency.visible & ~case.get_expected_visibility(*case.make_usual_inputs()).cpu()).any())


def describe_unhidden_token(case: Case, inputs: tuple[Tensor, ...], context: Tensor, size: float) -> str | None:
    """Describe the first output that moves with a token hidden from it; None if none does."""
    expected = case.get_expected_visibility(*inputs).cpu()
    other = scale_inputs(case, 100, size)
    for j in mask_requirements.choose_queries(expected.shape[-1], case.expects):
        hidden = (~expected & expected.any(-1, keepdim=True))[0, :, j]  # (q,)
        if case.subject.form == "x" and j < len(hidden):
            hidden[j] = False  # a residual passes on a token's own value
        if not hidden.any():
            continue
        unhidden = describe_moved_output(case, inputs, other, context, hidden, (0, j))
        if unhidden is not None:
            return unhidden
    return None


def describe_moved_output(
    case: Case, inputs: tuple[Tensor, ...], other: tuple[Tensor, ...], context: Tensor, hidden: Tensor, place: tuple[int, int]
) -> str | None:
    """Describe the first output that moves with the token at a place, a sequence and a number, that is hidden from it."""
    b, j = place
    changed = case.compute_seeded_context(*dependency.replace_token(inputs, other, b, j)).double().cpu()
    moves, top = ((changed - context)[b].abs().amax(-1), context[b].abs().amax(-1).nan_to_num())
    leaking = hidden & (moves > HIDDEN * top)
    if not leaking.any():
        return None
    i = int(leaking.int().argmax())
    token, output = evidence.format_token(case, j), evidence.format_token(case, evidence.get_token_number(case, i))
    return f"changing token {token}, which is hidden, moves output {output} by {float(moves[i]):.2g}"
