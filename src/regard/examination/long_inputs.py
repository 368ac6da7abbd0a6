"""Check that outputs of longer inputs, over several whole and partial kernel blocks, follow the formula of few tokens."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from regard.examination import dependency, evidence, mask_requirements
from regard.examination.call_checks import scale_checks
from regard.examination.case import Case
from regard.examination.identify.match import CLOSE, LOOSE, Match
from regard.examination.identify.mistakes import format_formula
from regard.examination.identify.trial import Trial, make_function_trial, make_target, make_trial
from regard.examination.identify.variants import compute_context, find_blind_queries
from regard.examination.report import Finding, Unknown
from regard.examination.subject.adapters import SubjectError

LENGTHS = (40, 100, 128, 200, 257)  # tokens: whole and partial blocks of 16, 32, 64 and 128
ONE, WIDE = (200,), 2048  # the only length tried for layers wider than WIDE, where each takes seconds
WHOLE = (32, 64, 256)  # for subjects that take only whole blocks, or fewer tokens
NEAR, NEAR_HALF = 1e-3, 0.05  # of the largest output, above which two lengths disagree
BLOCKS = (
    "In each block: if its maximum exceeds the running maximum, multiply the running sum and output by exp(old - new); divide "
    "by the sum once, at the end. Rebuild a scale or a table that was made for fewer tokens."
)
MEANT = "nothing, if scores are meant to grow with the number of tokens, as with a temperature by log n"
LAST = "Loop over every block of keys, including the shorter last one: range(0, t, block), keys[start : min(start + block, t)]."
FACTORS = torch.logspace(-2, 2, 33, base=2.0, dtype=torch.float64)  # that are tried, of each query
STEPS = 40  # of the search between two of them


@dataclass(frozen=True, eq=False)
class LongInputs:
    """Seeded inputs of one sequence times size, of which shorter inputs are the first tokens, and their contexts by length."""

    case: Case
    tokens: int
    size: float
    seed: int = 5
    contexts: dict[int, Tensor] = field(default_factory=dict)

    @cached_property
    def longest(self) -> tuple[Tensor, ...]:
        """The inputs with all tokens."""
        return self.case.make_inputs(self.tokens, 1, self.seed, self.size)

    def take_first(self, t: int) -> tuple[Tensor, ...]:
        """Return the first t tokens of each input, copied."""
        return take_first_tokens(self.longest, t)

    def compute_context(self, t: int) -> Tensor:
        """Return the context (1, t, c) of the first t tokens, computed once."""
        if t not in self.contexts:
            self.contexts[t] = self.case.compute_seeded_context(*self.take_first(t))
        return self.contexts[t]


def choose_lengths(width: int) -> tuple[int, ...]:
    """Return the lengths to try for a subject of this width."""
    return ONE if width > WIDE else LENGTHS


def compare_lengths(case: Case, lengths: list[int], inputs: LongInputs) -> Finding | Unknown | str:
    """Return what differs from the formula, or else between lengths; if nothing does, a phrase that states the tolerance."""
    match = case.match
    try:
        if torch.finfo(case.usual_context.dtype).bits < 32:  # of the output, which torch.autocast may round
            inputs = replace(inputs, case=case.double or case, contexts={})
        if match is None:
            return compare_prefixes(inputs, lengths)
        return "" if match.variant.deviations else check_formula(inputs, match, lengths)
    except SubjectError:  # it rejects these numbers, though it took others of this length
        return ""


def check_formula(inputs: LongInputs, match: Match, lengths: list[int]) -> Finding | Unknown | str:
    """Compare outputs with the formula, in float64 if the difference may be rounding, which another probe checks."""
    case = inputs.case
    difference = find_formula_difference(inputs, match, lengths, CLOSE.get(case.usual_context.dtype, LOOSE))
    double = case.double
    if (
        isinstance(difference, str)
        or double in (None, case)
        or isinstance(find_formula_difference(inputs, match, lengths, NEAR_HALF), Finding)
    ):
        return difference
    assert double is not None
    return find_formula_difference(replace(inputs, case=double, contexts={}), match, lengths, CLOSE[torch.float64])


def find_formula_difference(long: LongInputs, match: Match, lengths: list[int], close: float) -> Finding | Unknown | str:
    """Return a finding for the shortest length at which outputs differ from the formula by more than `close`.

    If none differs, a phrase that states the tolerance; "" if the layout does not fit.
    """
    case = long.case
    products: dict[str, Tensor] = {}  # of the longest inputs; shorter inputs are their first tokens
    wrong: tuple[Trial, tuple[Tensor, ...], Tensor] | None = None
    for t in sorted(lengths, reverse=True):
        inputs = long.take_first(t)
        target = make_target(case, inputs, None, long.compute_context(t))
        target = replace(target, products={name: made[:, :t] for name, made in products.items()})
        trial = make_function_trial(target) if case.subject.form == "qkv" else make_trial(match.layout, match.heads, target)
        if trial is None:
            return ""
        products = products or {name: made for name, made in target.products.items() if made.dim() == 3}
        differences = compute_differences(trial, match)
        if (differences > close).any():
            wrong = trial, inputs, differences
    if wrong is None:
        return f", outputs within {close:.0e} of the formula"
    trial, inputs, differences = wrong
    few = case.shapes.tokens - case.shapes.gap
    factors = find_position_factors(trial, lambda one: compute_differences(one, match), few, close)
    if factors is not None:
        base = scale_checks.find_log_base(factors)
        at_far = "" if base is None else f", with queries times log n / log {base:.4g} for positions n > {base:.4g}"
        return f", outputs within {close:.0e} of the formula{at_far}" if at_far else report_factors(factors)
    sentence = f"from {format_formula(match)}, which holds for {case.shapes.tokens} tokens"
    far = f"{float(differences.max()):.2g} of the largest output {sentence}"
    return explain_difference(case, inputs, differences > close, far)


def find_position_factors(
    trial: Trial, compute_differences: Callable[[Trial], Tensor], few: int, close: float
) -> Tensor | None:
    """Return a factor on each query, (q,), with which a formula gives all outputs; None unless the first `few` need none.

    Log n, as in Chiang and Cholak 2022, Overcoming a Theoretical Limitation of Self-Attention, and the temperature of Llama 4.
    """

    def compute(factors: Tensor) -> Tensor:
        given = replace(trial.given, q=trial.given.q * factors[None, :, None])
        return compute_differences(replace(trial, given=given))

    one = torch.ones(trial.given.q.shape[1], dtype=torch.float64)
    own = compute(one)
    if (own[:few] > close).any():
        return None
    tried = torch.stack([compute(one * factor) for factor in FACTORS])  # (n, q)
    best = tried.argmin(0).clamp(1, len(FACTORS) - 2)
    low, high = FACTORS[best - 1].log(), FACTORS[best + 1].log()
    for _ in range(STEPS):  # golden section
        third = (high - low) * 0.381966
        left, right = (compute(at.exp()) for at in (low + third, high - third))
        low, high = torch.where(left < right, low, low + third), torch.where(left < right, high - third, high)
    factors = torch.where(own > close, ((low + high) / 2).exp(), one)
    return factors if bool((compute(factors) <= close).all()) else None


def report_factors(factors: Tensor) -> Unknown:
    """Return that queries are multiplied by factors of their positions, which may be meant so."""
    first = int((factors != 1).int().argmax())
    what = f"queries from {first} on are multiplied by factors of their position, from {float(factors[first:].min()):.3g} to "
    return Unknown(f"whether it is intended that {what}{float(factors.max()):.3g}", MEANT)


def compute_differences(trial: Trial, match: Match) -> Tensor:
    """Compute how far each output is from the formula, relative to the largest, (q,)."""
    weight, bias = trial.sketched_projection
    meant = compute_context(match.variant, trial.given) @ weight + bias
    rows = (trial.target.finite_rows & ~find_blind_queries(match.variant, trial.given))[0]
    top = float(meant[0, rows].abs().max()) if rows.any() else 0.0
    differences = (trial.target.sketched_outputs - meant)[0].abs().amax(-1) / max(top, 1e-300)
    return differences.masked_fill(~rows, 0.0)


def compare_prefixes(inputs: LongInputs, lengths: list[int]) -> Finding | Unknown | str:
    """Compare the first outputs of longer inputs with those of shorter ones, which agree if no query sees later tokens.

    Returns a phrase that states the tolerance if they agree, "" if nothing can be compared.
    """
    case = inputs.case
    tolerance = NEAR if torch.finfo(case.usual_context.dtype).bits >= 32 else NEAR_HALF
    few = min(lengths)
    if not torch.equal(convert_outputs(inputs.compute_context(few)), compute_outputs(case, inputs.take_first(few), 1)):
        return ""  # the subject is random, and draws other numbers at another length
    uneven = check_equal_values(case, inputs.take_first(max(lengths)), tolerance)
    if uneven is not None:
        return uneven
    steps = [(n, t) for n, t in itertools.pairwise(sorted(lengths)) if has_steady_prefix(case, n, t)]
    for n, t in steps:
        short, long = (convert_outputs(inputs.compute_context(size))[:n] for size in (n, t))
        differences = (short - long).abs().amax(-1).nan_to_num() / long.nan_to_num().abs().max().clamp_min(1e-300)
        if not (differences > tolerance).any():
            continue
        sentence = f"{float(differences.max()):.2g} of the largest output from the first {n} of {t} tokens"
        for size in (n, t):  # the longer output may be the wrong one, or both are right, with positions that scale
            wrong = torch.nn.functional.pad(differences > tolerance, (0, size - n))
            finding = explain_unseen_tokens(case, inputs.take_first(size), wrong)
            if finding is not None:
                return finding
        return Unknown(
            f"whether more tokens follow the same formula: with {n} tokens outputs differ by up to {sentence}", evidence.ALONE
        )
    return f", common outputs within {tolerance:.0e} of each other" if steps else ""


def check_equal_values(case: Case, base: tuple[Tensor, ...], tolerance: float) -> Finding | None:
    """Check that outputs are equal if all values are, as they are for any weights that add to one; None if they are."""
    t = base[-1].shape[-2]
    alike = (*base[:-1], base[-1][..., :1, :].expand_as(base[-1]).clone())
    few, many = (compute_spread(compute_outputs(case, take_first_tokens(alike, n))) for n in (case.shapes.tokens, t))
    least, most = float(few.max()), float(many.max())
    if least > tolerance / 10 or most < max(
        10 * tolerance, 100 * least
    ):  # few outputs differ already: positions enter, or a sink
        return None
    sentence = (
        f"if all values are equal, outputs for {t} tokens differ by {most:.2g} of the largest, for {len(few)} they do not"
    )
    return Finding("not normalised", f"{sentence}: rows of weights do not sum to one", BLOCKS, 0.8, "norm")


def compute_spread(y: Tensor) -> Tensor:
    """Compute how far each output is from the first, relative to the largest, (t,)."""
    return (y - y[0]).abs().amax(-1).nan_to_num() / y.nan_to_num().abs().max().clamp_min(1e-300)


def has_steady_prefix(case: Case, n: int, t: int) -> bool:
    """Return whether the first n of t tokens may see what n tokens alone may see."""
    many, few = (mask_requirements.expand_mask(case.expects, 1, size, size, case.offset)[0] for size in (t, n))
    return torch.equal(many[:n, :n], few) and not bool(many[:n, n:].any())


def take_first_tokens(inputs: tuple[Tensor, ...], t: int) -> tuple[Tensor, ...]:
    """Return the first t tokens of each input, copied."""
    return tuple(x[..., :t, :].clone() for x in inputs)


def compute_outputs(case: Case, inputs: tuple[Tensor, ...], seed: int = 0) -> Tensor:
    """Return the context of one sequence, (t, c), with random numbers fixed by `seed`."""
    return convert_outputs(case.compute_seeded_context(*inputs, seed=seed))


def convert_outputs(context: Tensor) -> Tensor:
    """Return the context of the first sequence, (t, c), in float64 on the CPU."""
    return context[0].double().cpu()


def explain_difference(case: Case, inputs: tuple[Tensor, ...], wrong: Tensor, far: str) -> Finding:
    """Return the finding: a key that the last wrong output does not see, rows that do not add to one, or different outputs."""
    finding = explain_unseen_tokens(case, inputs, wrong)
    if finding is not None:
        return finding
    t, i = inputs[0].shape[-2], int(wrong.int().argmax())
    if case.subject.form == "qkv":
        ones = compute_outputs(case, (*inputs[:2], torch.ones_like(inputs[2])))
        off = (ones - 1).abs().amax(-1)
        if float(off.max()) > NEAR_HALF:
            row = int(off.argmax())
            return Finding(
                "not normalised", f"with {t} tokens row {row} of weights sums to {ones[row, 0]:.3g}", BLOCKS, 0.8, "norm"
            )
    return Finding("wrong blocks", f"with {t} tokens outputs from {i} on differ by up to {far}", BLOCKS, 0.8, "length")


def explain_unseen_tokens(case: Case, inputs: tuple[Tensor, ...], wrong: Tensor) -> Finding | None:
    """Return the finding of keys that the last wrong output may see but does not depend on; None if there are none."""
    t, last = inputs[0].shape[-2], int(wrong.nonzero()[-1])
    missed = find_unseen_tokens(case, inputs, last)
    if not missed:
        return None
    sentence = f"with {t} tokens query {last} may see token {missed[0]}, but output {last} does not depend on it"
    more = f", nor on {len(missed) - 1} more" if len(missed) > 1 else ""
    return Finding("wrong mask", sentence + more, LAST, 0.8, "mask")


def find_unseen_tokens(case: Case, inputs: tuple[Tensor, ...], i: int) -> list[int]:
    """Return the tokens that query i may see but on which its output does not depend at all; empty without a gradient."""
    inputs = tuple(x.clone().requires_grad_() for x in inputs)
    try:
        y = case.compute_context(*inputs)
        strength = dependency.compute_token_norms(
            dependency.compute_token_gradients(y[0, i] @ dependency.draw_direction(y, 0), inputs)
        )[0]
    except SubjectError:  # a kernel without a gradient
        return []
    missed = case.get_expected_visibility(*inputs)[0, i].cpu() & (strength == 0)
    return [int(j) for j in missed.nonzero().flatten()] if strength.any() else []
