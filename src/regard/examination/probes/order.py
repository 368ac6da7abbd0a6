"""Check that the order of tokens matters only if positions enter, and that it matters if a layer holds positions."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.examination import evidence, mask_requirements
from regard.examination.call_checks import position_checks
from regard.examination.call_reading import frequency_reading, table_reading
from regard.examination.case import Case, copy_subject_as_double
from regard.examination.identify import weight_reading
from regard.examination.report import Checked, Finding, Unknown
from regard.examination.subject.adapters import SubjectError

SHARE = {torch.float64: 1e-6, torch.float32: 1e-4}  # of how far an output moves if the same tokens are replaced
COARSE = 0.05  # in half precision
ROWS = 3  # queries to check
PLACES = (
    "Give each token its position along the axis of tokens, arange(t): angles (t, d / 2) broadcast to q and k (b, h, t, d); "
    "before the transpose, (b, t, h, d), they must be (t, 1, d / 2). Rotate keys as well as queries. A bias must differ from "
    "key to key: -slope * (i - j)."
)
UNSURE = "the layer without its positions, if the order must not matter; nothing, if it computes positions in its forward"
NAMED = re.compile(
    r"(?:^|[._])(?:pos(?:ition(?:al|s)?)?|pos_?(?:ition(?:al)?)?s?_?(?:emb|enc|bias|table)\w*|w?pe|inv_freq\w*|rotary\w*|rope\w*"
    r"|alibi\w*|slopes|freqs_cis|rel(?:ative)?(?:_(?:pos|bias|attention_bias|key|emb|table|dist)\w*)?|(?:cos|sin)_cache\w*)(?:\.weight)?$"
)
ELSEWHERE = (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.modules.conv._ConvNd)  # their weights are never positions


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
    slopes = position_checks.check_slopes(case.inner_calls)
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
    positions = find_position_tensors(case.subject.module)
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
        gradient_case = make_changed_case(case, require_position_gradients)
        used = (
            find_used_positions(gradient_case[1], gradient_case[0].compute_context(*case.make_usual_inputs()))
            if gradient_case is not None
            else []
        )
        random_case = make_changed_case(case, randomize_positions)
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


def report_order(case: Case, positions: dict[str, Tensor], sentence: str) -> Iterator[Checked | Unknown]:
    """Yield the result if the order matters: expected with positions, and else not known."""
    if positions:
        there = f"{sentence}; there is {next(iter(positions))}"
        yield Checked("the order of tokens matters, as expected with positions", there)
    elif case.match is None:  # an identified formula has no positions, and its mistake is reported
        yield Unknown(f"whether the order of tokens may matter: {sentence}, and no positions were found in the layer", UNSURE)


def find_position_tensors(module: nn.Module | None) -> dict[str, Tensor]:
    """Return the tensors with more than one number whose names mean positions: parameters, buffers and attributes."""
    found: dict[str, Tensor] = {}
    for path, part in module.named_modules() if module is not None else ():
        if not isinstance(part, ELSEWHERE):
            own = {**part._parameters, **part._buffers, **vars(part)}
            found |= {f"{path}.{name}".lstrip("."): one for name, one in own.items() if isinstance(one, Tensor)}
    return {name: one for name, one in found.items() if NAMED.search(name.lower()) and has_several_numbers(one)}


def has_several_numbers(one: Tensor) -> bool:
    """Return whether a tensor holds more than one real or complex number: no indices, no booleans, no single factor."""
    return (one.is_floating_point() or one.is_complex()) and one.numel() > 1


def randomize_positions(module: nn.Module) -> nn.Module:
    """Fill a module's positions, and any all-zero parameter that may hide them, with normal numbers in place."""
    dice = torch.Generator().manual_seed(5)
    hiding = [one for one in module.parameters() if one.numel() and not one.any()]
    with torch.no_grad():
        for one in [*find_position_tensors(module).values(), *hiding]:
            one.copy_(torch.randn(one.shape, generator=dice, dtype=torch.float64))
    return module


def find_used_positions(module: nn.Module, output: Tensor) -> list[str]:
    """Return the names of the positions that an output depends on by a differentiable path, even with a gradient of 0."""
    tensors = {name: one for name, one in find_position_tensors(module).items() if one.requires_grad}
    if not tensors or not output.requires_grad:
        return []
    slopes = torch.autograd.grad(output.sum(), list(tensors.values()), allow_unused=True)
    return [name for name, slope in zip(tensors, slopes, strict=True) if slope is not None]


def require_position_gradients(module: nn.Module) -> nn.Module:
    """Make a module's positions require a gradient."""
    for one in find_position_tensors(module).values():
        if one.is_leaf:
            one.requires_grad_()
    return module
