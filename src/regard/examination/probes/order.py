"""Check that the order of tokens matters only if positions enter, and that it matters if a layer holds positions."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.examination import evidence, mask_requirements
from regard.examination.call_checks import position_checks, slope_checks
from regard.examination.call_reading import frequency_reading, table_reading
from regard.examination.case import Case, copy_subject_as_double
from regard.examination.identify import weight_reading
from regard.examination.report import Checked, Finding, Unknown
from regard.examination.subject import position_tensors
from regard.examination.subject.adapters import SubjectError
from regard.mechanism import Causal

SHARE = {torch.float64: 1e-6, torch.float32: 1e-4}  # of how far an output moves if the same tokens are replaced
COARSE = 0.05  # in half precision
APART = 1e-3  # of log weights, above which a shift changes them
SHIFTS = (1, 2, 3)  # positions to shift by: a grid of rows shows its distances after a row
ROWS = 3  # queries to check
PLACES = (
    "Give each token its position along the axis of tokens, arange(t): angles (t, d / 2) broadcast to q and k (b, h, t, d); "
    "before the transpose, (b, t, h, d), they must be (t, 1, d / 2). Rotate keys as well as queries. A bias must differ from "
    "key to key: -slope * (i - j)."
)
TURN = "Rotate both queries and keys, each by its own position: q, k = rotate(q, cos, sin), rotate(k, cos, sin)."
UNSURE = "the layer without its positions, if the order must not matter; nothing, if it computes positions in its forward"


class QueryRow(NamedTuple):
    """A query i of sequence b, and the tokens that it may see besides its own, two at least."""

    b: int
    i: int
    others: list[int]


def check_case(case: Case) -> Iterator[Finding | Checked | Unknown]:
    """Check rotations, biases, and whether an output moves if the tokens that its query sees change places, except its own."""
    results = list(check_reordering(case))
    if any(isinstance(one, Finding) for one in results):
        yield from results
        return
    positions = position_checks.check_positions(case.inner_calls)
    if isinstance(positions, Finding):  # of an identified formula too: rotations by head may not change its outputs
        yield positions
        return
    if case.match is not None:
        yield from results
        return
    slopes = slope_checks.check_slopes(case.inner_calls)
    frequencies = frequency_reading.check_frequencies(case.inner_calls)
    calls, module = case.long_calls or case.inner_calls, case.subject.module
    tables = table_reading.check_tables(calls, module)
    read = [one for one in (positions, frequencies, slopes, *tables) if one is not None]
    yield from (one for one in results if not read or isinstance(one, Checked))
    yield from read


def check_reordering(case: Case) -> Iterator[Finding | Checked | Unknown]:
    """Check whether an output moves if the tokens that its query sees change places, except its own."""
    rows = choose_rows(case)
    if not rows or evidence.has_no_dependency(case):
        return
    best = weight_reading.get_double_case(case)
    reorderings = measure_reorderings(best, rows)
    if not reorderings:
        return
    row, moved, share = max(reorderings, key=lambda one: one[2])
    positions = position_tensors.find_position_tensors(case.subject.module)
    seen = evidence.format_numbers(row.others)
    if share > get_least_ratio(best):
        sentence = f"reordering tokens {seen} moves output {evidence.format_token(case, row.i)} by {moved:.2g}"
        yield from report_order(best, positions, sentence)
    elif positions:
        sentence = f"reordering tokens {seen} does not change output {evidence.format_token(case, row.i)}"
        yield from report_idle_positions(best, rows, next(iter(positions)), sentence)
    else:
        least_seen = f"{get_least_ratio(best):.0e} of the effect of replacing the tokens would be detected"
        yield Checked("the order of tokens does not matter, as expected without positions", least_seen)


def choose_rows(case: Case) -> list[QueryRow]:
    """Return queries that may see two tokens besides their own, not just one before and one after at the same distance."""
    expected = case.get_expected_visibility(*case.make_usual_inputs()).cpu()
    own = mask_requirements.make_own_table(expected.shape[1], expected.shape[2], case.offset).expand_as(expected)
    rows = []
    for b, i in (expected.sum(-1) > 1).nonzero().tolist():
        others = [int(j) for j in (expected[b, i] & ~own[b, i]).nonzero().flatten()]
        place = int(own[b, i].int().argmax())
        if len(others) > 2 or (len(others) == 2 and sum(others) != 2 * place):
            rows.append(QueryRow(b, i, others))
    rows.sort(key=lambda row: -len(row.others))
    spread = [rows[round(n * (len(rows) - 1) / (ROWS - 1))] for n in range(ROWS)] if rows else []
    return list({(row.b, row.i): row for row in spread}.values())


def measure_reorderings(case: Case, rows: list[QueryRow]) -> list[tuple[QueryRow, float, float]]:
    """Return how far outputs move if each of their tokens takes the next one's place, and the ratio to other tokens' effect.

    An output that other tokens do not move either is left out.
    """
    inputs, others = case.make_usual_inputs(), case.make_usual_inputs(9)
    first = 0 if case.subject.form == "x" else 1  # for a function, keys and values move together

    def measure_replacement(row: QueryRow, source: tuple[Tensor, ...], places: list[int]) -> float:
        changed = [x.clone() for x in inputs]
        for x, other in list(zip(changed, source, strict=True))[first:]:
            x[row.b].index_copy_(-2, torch.tensor(row.others, device=x.device), other[row.b][..., places, :])
        return float((case.compute_seeded_context(*changed) - case.usual_context)[row.b, row.i].abs().nan_to_num().max())

    reorderings = []
    for row in rows:
        largest = measure_replacement(row, others, row.others)
        change = measure_replacement(row, inputs, row.others[1:] + row.others[:1])
        reorderings += [(row, change, change / largest)] if largest > 0 else []
    return reorderings


def get_least_ratio(case: Case) -> float:
    """Return the smallest ratio that is not rounding."""
    return SHARE.get(case.subject.dtype, COARSE)


def report_idle_positions(case: Case, rows: list[QueryRow], name: str, sentence: str) -> Iterator[Finding | Unknown]:
    """Yield the result for positions that are held where order does not matter: unused, all alike, or wrong."""
    what = f"whether the order of tokens should matter: it does not, though there is {name}"
    try:
        gradient_case = make_changed_case(case, position_tensors.require_position_gradients)
        used = (
            position_tensors.find_used_positions(gradient_case[1], gradient_case[0].compute_context(*case.make_usual_inputs()))
            if gradient_case is not None
            else []
        )
        random_case = make_changed_case(case, position_tensors.randomize_positions)
        shares = [share for _, _, share in measure_reorderings(random_case[0], rows)] if random_case is not None else []
        hidden = any(share > get_least_ratio(case) for share in shares)
    except (SubjectError, RuntimeError):  # no backward pass, or tensors that cannot be written
        random_case = None
    if random_case is None:
        yield Unknown(what, "a module that can be copied, with its positions in parameters or buffers")
    elif hidden:
        yield Unknown(f"{what}; with other numbers in it the order matters", "the trained layer")
    elif not used:
        yield Unknown(f"{what}, and no gradient reaches it", "a call in which the layer uses it: lambda x: layer(x, positions)")
    else:
        yield Finding(
            "wrong positions", f"{sentence}, though {used[0]} is used: it acts the same on all keys", PLACES, 1.2, "positions"
        )


def make_changed_case(case: Case, change: Callable[[nn.Module], nn.Module]) -> tuple[Case, nn.Module] | None:
    """Return the case of a changed copy of its module, and that copy; None if no copy can be called."""
    module, again = copy_subject_as_double(case.subject), case.subject.again
    if module is None or again is None:
        return None
    changed = change(module)
    return case.make_subcase(replace(case.subject, call=again(changed)), case.shapes), changed


def report_order(case: Case, positions: dict[str, Tensor], sentence: str) -> Iterator[Finding | Checked | Unknown]:
    """Yield the result if the order matters: by distance, if weights can be read and are the same for shifted tokens."""
    change = measure_shifts(case) if case.expects == Causal() else None
    name = next(iter(positions), "")
    if change is not None and change < APART:
        same = f"at shifted positions the same tokens have the same log weights to within {change:.0e}"
        yield Checked("positions act by distance", f"{sentence}; {same}")
    elif change is not None and position_tensors.is_relative_encoding(positions) and is_plain_softmax(case):
        far = f"at shifted positions, differences of the same tokens' log weights change by {change:.2g}"
        yield Finding("wrong positions", f"{far}: {name} acts by absolute position, not by distance", TURN, 1.4, "positions")
    elif positions:
        yield Checked("the order of tokens matters, as expected with positions", f"{sentence}; there is {name}")
    elif case.match is None:  # an identified formula has no positions, and its mistake is reported
        yield Unknown(f"whether the order of tokens may matter: {sentence}, and no positions were found in the layer", UNSURE)


def is_plain_softmax(case: Case) -> bool:
    """Return whether, with positions neutralized, the same tokens have the same weights if shifted: one softmax of pairs."""
    try:
        neutral_case = make_changed_case(case, position_tensors.neutralize_positions)
        change = None if neutral_case is None else measure_shifts(neutral_case[0])
    except (SubjectError, RuntimeError):
        return False
    return change is not None and change < APART


def measure_shifts(case: Case) -> float | None:
    """Return how much differences of log weights change if all tokens are shifted, the least over SHIFTS.

    A factor on a whole row, such as a temperature by position, is no change. None if weights cannot be read, or some are 0.
    """
    inputs = case.make_usual_inputs()
    if inputs[0].shape[-2] != inputs[-1].shape[-2] or inputs[0].shape[-2] <= max(SHIFTS) + 2:
        return None
    weights = weight_reading.read_weights(case, inputs)
    changes = [measure_shift(case, inputs, weights, shift) for shift in SHIFTS] if weights is not None else []
    known = [one for one in changes if one is not None]
    return min(known) if known and len(known) == len(changes) else None


def measure_shift(case: Case, inputs: tuple[Tensor, ...], weights: Tensor, shift: int) -> float | None:
    """Return how much differences of log weights change with one shift; None if weights cannot be read, or some are 0."""
    shifted_inputs = [
        torch.cat((y[..., :shift, :], x[..., :-shift, :]), -2) for x, y in zip(inputs, case.make_usual_inputs(9), strict=True)
    ]
    shifted_weights = weight_reading.read_weights(case, tuple(shifted_inputs))
    if shifted_weights is None:
        return None
    largest = 0.0
    for i in range(2, weights.shape[-2] - shift):
        rows = weights[..., i, : i + 1], shifted_weights[..., i + shift, shift : i + shift + 1]
        if not all((row > 0).all() for row in rows):
            return None
        one, two = (row.log()[..., 1:] - row.log()[..., :1] for row in rows)  # (b, h, i)
        factor = (one * two).sum(-1, keepdim=True) / (one * one).sum(-1, keepdim=True).clamp_min(1e-300)
        largest = max(largest, float((two - factor * one).abs().max()))
    return largest
