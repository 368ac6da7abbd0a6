"""Check that shorter and longer inputs follow the same rule and formula, if the subject takes them."""

import itertools
from collections.abc import Iterator

from torch import Tensor

from regard.examination import dependency, evidence, long_inputs, mask_requirements
from regard.examination.case import Case
from regard.examination.long_inputs import LongInputs
from regard.examination.probes import batch
from regard.examination.report import Checked, Finding, Unknown
from regard.examination.subject import inputs as shapes
from regard.examination.subject.restore_state import read_random_states, seed_generators

LONGEST, SHORT = 1100, 64  # tokens
BLOCKS = 32  # tokens, from which a kernel may work in blocks
SAME_OUTPUTS = "shorter and longer inputs give consistent outputs"
SAME_MASK = "no output of shorter and longer inputs moves with a hidden token"
DRAW = "Use no random numbers in evaluation, at any length: F.dropout(x, p, training=self.training)."
CURE = (
    "Make the mask for the current number of tokens: mask[:t, :t] of a long enough mask, or a new one for each length; in a "
    "kernel, mask every block that the diagonal crosses."
)


def check_case(case: Case) -> Iterator[Finding | Checked | Unknown]:
    """Check for a leak, a blind row or another formula at lengths other than the usual."""
    if not case.can_resize or case.shapes.gap:
        return
    accepted: list[int] = []
    rejected: list[int] = []
    lengths = choose_other_lengths(case)
    long, other = make_long_inputs(case, lengths)
    for t in itertools.chain(lengths, choose_block_lengths(case, lengths, rejected)):
        wrong = check_length(case, t, long, other)
        if isinstance(wrong, Finding):
            yield wrong
            return
        (accepted if wrong else rejected).append(t)
    if accepted:
        comparison = long_inputs.compare_lengths(case, accepted, long)
        if not isinstance(comparison, str):
            yield comparison
        if not isinstance(comparison, Finding):
            what = SAME_OUTPUTS if isinstance(comparison, str) else SAME_MASK
            yield report_same_rule(what, accepted, rejected, comparison if isinstance(comparison, str) else "")


def report_same_rule(what: str, accepted: list[int], rejected: list[int], how: str) -> Checked:
    """Return the result that lengths make no difference."""
    sentence = f"; it rejects {evidence.format_numbers(sorted(rejected))}" if rejected else ""
    tokens = f"{', '.join(map(str, sorted(accepted)))} token{'s' * (accepted != [1])}"
    return Checked(what, f"with {tokens}{how}{sentence}")


def choose_other_lengths(case: Case) -> list[int]:
    """Return other lengths to try: few tokens, several blocks of a kernel, more than the masks in a module take."""
    usual = case.shapes.tokens
    stated = [t for t in shapes.guess_lengths(case.subject.module, case.shapes.width) if t < LONGEST]
    short = {1, 2, usual - 1, 2 * usual + 1, *(t for t in stated if t <= SHORT)}
    lengths = short | {t + 1 for t in stated} | {*long_inputs.choose_lengths(case.shapes.width)}
    return sorted(t for t in lengths - {usual} if 0 < t <= (case.shapes.most or LONGEST))


def make_long_inputs(case: Case, lengths: list[int]) -> tuple[LongInputs, LongInputs]:
    """Return inputs of more than SHORT tokens, and others, of the size at which scores matter."""
    most = min(max(*lengths, *long_inputs.WHOLE), case.shapes.most or LONGEST)
    size = 1.0 if case.match is None else case.match.input_size
    return LongInputs(case, most, size), LongInputs(case, most, size, seed=105)


def choose_block_lengths(case: Case, tried: list[int], rejected: list[int]) -> Iterator[int]:
    """Yield lengths of whole kernel blocks, if one of LENGTHS was refused; consumed after the others."""
    if any(t in long_inputs.LENGTHS for t in rejected):
        yield from (
            t for t in long_inputs.WHOLE if t not in tried and t <= (case.shapes.most or LONGEST) and t != case.shapes.tokens
        )


def check_length(case: Case, t: int, long: LongInputs, long_other: LongInputs) -> Finding | bool:
    """Return the finding with t tokens; True if nothing is wrong, False if the subject refuses them.

    Up to SHORT tokens the inputs are two sequences of their own.
    """
    is_short = t <= SHORT
    inputs = case.make_inputs(t) if is_short else long.take_first(t)
    try:
        context, draws = compute_watched_context(case, inputs)
    except Exception:  # refusing another shape is allowed
        return False
    if context.shape[:2] != (len(inputs[0]), t):
        return False
    if draws and (random := find_randomness(case, inputs, context)) is not None:
        return random
    expected = case.get_expected_visibility(*inputs)
    broken = ~context.isfinite().all(-1) & expected.any(-1)
    if broken.any() and case.usual_context.isfinite().all():
        rows = int(broken[0].int().argmax()) if broken[0].any() else 0
        return Finding(
            "blind row",
            f"with {t} token{'s' * (t > 1)} row {rows} is not finite, but may see {int(expected[0, rows].sum())} of them",
            CURE,
            0.9,
            "length",
        )
    if not is_short:
        long.contexts[t] = context
    other = case.make_inputs(t, seed=104) if is_short else long_other.take_first(t)
    leaks = (find_leak(case, inputs, other, context, keys) for keys in choose_token_ranges(t))
    leak = next((one for one in leaks if one is not None), None)
    if leak is None:
        return True
    return (None if draws else find_randomness(case, inputs, context)) or leak


def compute_watched_context(case: Case, inputs: tuple[Tensor, ...]) -> tuple[Tensor, bool]:
    """Return the context (b, t, c) with fixed random numbers, and whether any were drawn."""
    seed_generators(0, case.subject.device)
    before = read_random_states(case.subject.device)
    context = case.compute_seeded_context(*inputs).cpu()
    is_unknown = case.subject.device.type not in ("cpu", "cuda")
    return context, is_unknown or read_random_states(case.subject.device) != before


def find_randomness(case: Case, inputs: tuple[Tensor, ...], context: Tensor) -> Finding | None:
    """Return the finding of another call with the same inputs whose context differs; None if it does not."""
    t = inputs[-1].shape[-2]
    change = dependency.measure_difference(context, case.compute_seeded_context(*inputs, seed=1).cpu())
    sentence = f"with {t} token{'s' * (t > 1)} two calls in evaluation differ by {change:.2g}"
    return Finding("dropout in evaluation", sentence, DRAW, 0.9, "dropout") if change else None


def choose_token_ranges(t: int) -> list[tuple[int, int]]:
    """Return ranges of tokens, (first, end), to change together: if a row before them moves, that is a leak.

    They start within a block of any size and where blocks end; one is the first half, which a window leaves behind.
    """
    if t < BLOCKS:
        return [(j, j + 1) for j in dict.fromkeys((t - 1, t // 2, 0))]
    if t > max(long_inputs.LENGTHS):
        return [(t - 1, t)]
    edge = 1 << ((t - 1).bit_length() - 1)
    return [(first, t) for first in sorted({7 * t // 8 | 1, edge})] + [(0, t // 2)]


def find_leak(
    case: Case, inputs: tuple[Tensor, ...], other: tuple[Tensor, ...], context: Tensor, keys: tuple[int, int]
) -> Finding | None:
    """Return the finding of the first output that moves with these tokens of the first sequence and may see none of them.

    The tokens are replaced by those of `other`.
    """
    t, (first, end) = inputs[0].shape[-2], keys
    hidden = ~case.get_expected_visibility(*inputs)[..., first:end].any(-1)
    hidden[1:] = case.subject.is_batched
    if case.subject.form == "x":
        hidden[0, first:end] = False  # a residual passes on a token's own value
    if not hidden.any():
        return None
    replaced_inputs = replace_tokens(inputs, other, keys)
    moves = (case.compute_seeded_context(*replaced_inputs).cpu() - context).double().abs().amax(-1)  # (b, t)
    leaking = hidden & (moves > dependency.estimate_rounding(context.dtype) * context.double().abs().amax(-1))
    if not leaking.any():
        return None
    if end - first > 1:
        middle = (first + end) // 2
        halves = (find_leak(case, inputs, other, context, half) for half in ((first, middle), (middle, end)))
        return next((one for one in halves if one is not None), report_leak(case, t, keys, leaking, moves))
    return report_leak(case, t, keys, leaking, moves)


def replace_tokens(inputs: tuple[Tensor, ...], other: tuple[Tensor, ...], keys: tuple[int, int]) -> tuple[Tensor, ...]:
    """Return inputs with a range of tokens of the first sequence, their x or key and value, taken from `other`."""
    chosen = slice(*keys)
    copies = [x.clone() for x in inputs]
    for n, (x, instead) in enumerate(zip(copies, other, strict=True)):
        if len(inputs) == 1 or n:
            x[0, ..., chosen, :] = instead[0, ..., chosen, :]
    return tuple(copies)


def report_leak(case: Case, t: int, keys: tuple[int, int], leaking: Tensor, moves: Tensor) -> Finding:
    """Return the finding of a leak."""
    b, i = (int(n) for n in leaking.nonzero()[0])
    first, end = keys
    which = f"token {first}" if end - first == 1 else f"tokens {first} to {end - 1}"
    whose = f"{i} of another sequence" if b else f"{i}"
    sentence = f"with {t} token{'s' * (t > 1)} changing {which} moves output {whose} by {moves[b, i]:.2g}"
    if b:
        return Finding("batch leak", sentence, batch.CURE, 0.7, "batch")
    future = mask_requirements.find_future(case.expects, (1, t, t), case.offset)[0, i, first:end]
    kind = "future leak" if future.any() else "wrong mask"
    return Finding(kind, f"{sentence}, which may not see it", CURE, 0.7, "mask")
