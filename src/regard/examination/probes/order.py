"""Check that the order of tokens matters only if positions enter, and that it matters if a layer holds positions."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.examination import evidence, positions, rules
from regard.examination.case import Case, copied
from regard.examination.identify import reading
from regard.examination.report import Checked, Finding, Unknown
from regard.examination.subjects import AskedError
from regard.mechanism import Causal

SHARE = {torch.float64: 1e-6, torch.float32: 1e-4}  # of how far an output moves if the same tokens are replaced
COARSE = 0.05  # in half precision
APART = 1e-3  # of log weights, above which a shift changes them
SHIFTS = (1, 2, 3)  # positions to shift by: a grid of rows shows its distances after a row
ROWS = 3  # queries to check
PLACES = (
    "Give each token the position that it has along the tokens' axis, arange(t): angles (t, d / 2) fit q and k (b, h, t, d); "
    "before the transpose, (b, t, h, d), they must be (t, 1, d / 2). Turn keys as well as queries. A bias differs from key to "
    "key: -slope * (i - j)."
)
TURN = "Turn both, queries and keys, each by its own position: q, k = rotate(q, cos, sin), rotate(k, cos, sin)."
UNSURE = "the layer without its positions, where the order must not matter; nothing, where it makes positions as it runs"


class Row(NamedTuple):
    """A query i of sequence b, and the tokens that it may see besides its own, two at least."""

    b: int
    i: int
    others: list[int]


def look(case: Case) -> Iterator[Finding | Checked | Unknown]:
    """Check whether an output moves if the tokens that its query sees change places, except its own."""
    rows = chosen(case)
    if not rows or evidence.idle(case):
        return
    best = reading.exact(case)
    asked = [(row, *change) for row in rows if (change := turned(best, row)) is not None]
    if not asked:
        return
    row, moved, share = max(asked, key=lambda one: one[2])
    held = positions.held(case.subject.module)
    seen = evidence.listed(row.others)
    if share > least(best):
        told = f"tokens {seen} in another order move output {evidence.token(case, row.i)} by {moved:.2g}"
        yield from mattering(best, held, told)
    elif held:
        told = f"output {evidence.token(case, row.i)} is the same with tokens {seen} in another order"
        yield from without(best, rows, next(iter(held)), told)
    else:
        least_seen = f"of what other tokens in their place do {least(best):.0e} would have shown"
        yield Checked("the order of tokens does not matter, as no position enters", least_seen)


def chosen(case: Case) -> list[Row]:
    """Return queries that may see two tokens besides their own, not just one before and one after at the same distance."""
    expected = case.expected(*case.usual()).cpu()
    own = rules.own(expected.shape[1], expected.shape[2], case.offset).expand_as(expected)
    found = []
    for b, i in (expected.sum(-1) > 1).nonzero().tolist():
        others = [int(j) for j in (expected[b, i] & ~own[b, i]).nonzero().flatten()]
        place = int(own[b, i].int().argmax())
        if len(others) > 2 or (len(others) == 2 and sum(others) != 2 * place):
            found.append(Row(b, i, others))
    found.sort(key=lambda row: -len(row.others))
    spread = [found[round(n * (len(found) - 1) / (ROWS - 1))] for n in range(ROWS)] if found else []
    return list({(row.b, row.i): row for row in spread}.values())


def turned(case: Case, row: Row) -> tuple[float, float] | None:
    """Return how far an output moves if each of its tokens takes the next one's place, and its ratio to other tokens' effect.

    None if other tokens do not move the output either.
    """
    inputs, others = case.usual(), case.usual(9)
    first = 0 if case.subject.form == "x" else 1  # for a function, keys and values move together
    before = case.repeated(*inputs)[row.b, row.i]

    def moved(source: tuple[Tensor, ...], places: list[int]) -> float:
        changed = [x.clone() for x in inputs]
        for x, other in list(zip(changed, source, strict=True))[first:]:
            x[row.b].index_copy_(-2, torch.tensor(row.others, device=x.device), other[row.b][..., places, :])
        return float((case.repeated(*changed)[row.b, row.i] - before).abs().nan_to_num().max())

    most = moved(others, row.others)
    change = moved(inputs, row.others[1:] + row.others[:1])
    return (change, change / most) if most > 0 else None


def least(case: Case) -> float:
    """Return the smallest ratio that is not rounding."""
    return SHARE.get(case.subject.dtype, COARSE)


def without(case: Case, rows: list[Row], name: str, told: str) -> Iterator[Finding | Unknown]:
    """Yield the result for positions that are held where order does not matter: unused, all alike, or wrong."""
    what = f"whether the order of tokens is to matter: it does not, though it holds {name}"
    try:
        asking = other(case, positions.asked_for)
        inside = positions.entering(asking[1], asking[0].context(*case.usual())) if asking is not None else []
        drawn = other(case, positions.drawn)
        shares = [turned(drawn[0], row) for row in rows] if drawn is not None else []
        hidden = any(one is not None and one[1] > least(case) for one in shares)
    except (AskedError, RuntimeError):  # no backward pass, or tensors that cannot be written
        drawn = None
    if drawn is None:
        yield Unknown(what, "a module that can be copied, its positions among its parameters or buffers")
    elif hidden:
        yield Unknown(f"{what}; with other numbers in it the order matters", "the layer when it is trained")
    elif not inside:
        yield Unknown(
            f"{what}, and no gradient goes there", "the layer with what makes it use it: lambda x: layer(x, positions)"
        )
    else:
        yield Finding("wrong positions", f"{told}, though {inside[0]} enters: the same for all keys", PLACES, 1.2, "positions")


def other(case: Case, change: Callable[[nn.Module], nn.Module]) -> tuple[Case, nn.Module] | None:
    """Return the case of a changed copy of its module, and that copy; None if no copy can be called."""
    module, again = copied(case.subject), case.subject.again
    if module is None or again is None:
        return None
    changed = change(module)
    return case.within(replace(case.subject, call=again(changed)), case.shapes), changed


def mattering(case: Case, held: dict[str, Tensor], told: str) -> Iterator[Finding | Checked | Unknown]:
    """Yield the result if the order matters: by distance, if weights can be read and are the same for shifted tokens."""
    change = further(case) if case.expects == Causal() else None
    name = next(iter(held), "")
    if change is not None and change < APART:
        same = f"further on the same tokens have the same log weights to {change:.0e}"
        yield Checked("positions enter by distance", f"{told}; {same}")
    elif change is not None and positions.by_distance(held) and plain(case):
        far = f"further on, differences of the same tokens' log weights change by {change:.2g}"
        yield Finding("wrong positions", f"{far}: {name} enters by place, not by distance", TURN, 1.4, "positions")
    elif held:
        yield Checked("the order of tokens matters, as it may where positions are held", f"{told}; it holds {name}")
    elif case.identified is None:  # an identified formula has no positions, and its mistake is reported
        yield Unknown(f"whether the order of tokens may matter: {told}, and no positions are found in it", UNSURE)


def plain(case: Case) -> bool:
    """Return whether, with positions neutralized, the same tokens have the same weights if shifted: one softmax of pairs."""
    try:
        still = other(case, positions.stilled)
        change = None if still is None else further(still[0])
    except (AskedError, RuntimeError):
        return False
    return change is not None and change < APART


def further(case: Case) -> float | None:
    """Return how much differences of log weights change if all tokens are shifted, the least over SHIFTS.

    A factor on a whole row, such as a temperature by position, is no change. None if weights cannot be read, or some are 0.
    """
    inputs = case.usual()
    if inputs[0].shape[-2] != inputs[-1].shape[-2] or inputs[0].shape[-2] <= max(SHIFTS) + 2:
        return None
    here = reading.weights_of(case, inputs)
    changes = [shifted(case, inputs, here, shift) for shift in SHIFTS] if here is not None else []
    told = [one for one in changes if one is not None]
    return min(told) if told and len(told) == len(changes) else None


def shifted(case: Case, inputs: tuple[Tensor, ...], weights: Tensor, shift: int) -> float | None:
    """Return how much differences of log weights change with one shift; None if weights cannot be read, or some are 0."""
    moved = [torch.cat((y[..., :shift, :], x[..., :-shift, :]), -2) for x, y in zip(inputs, case.usual(9), strict=True)]
    there = reading.weights_of(case, tuple(moved))
    if there is None:
        return None
    largest = 0.0
    for i in range(2, weights.shape[-2] - shift):
        rows = weights[..., i, : i + 1], there[..., i + shift, shift : i + shift + 1]
        if not all((row > 0).all() for row in rows):
            return None
        one, two = (row.log()[..., 1:] - row.log()[..., :1] for row in rows)  # (b, h, i)
        factor = (one * two).sum(-1, keepdim=True) / (one * one).sum(-1, keepdim=True).clamp_min(1e-300)
        largest = max(largest, float((two - factor * one).abs().max()))
    return largest
