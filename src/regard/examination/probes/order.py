"""Order: it matters where tokens stand only where positions enter, and where a layer holds positions it does matter."""

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

SHARE = {torch.float64: 1e-6, torch.float32: 1e-4}  # of how far the same tokens move an output when they are replaced
COARSE = 0.05  # in half precision
APART = 1e-3  # of log weights, beyond which they are not the same further on
SHIFTS = (1, 2, 3)  # places further on: a grid of rows shows its distances after a row
ROWS = 3  # that are asked
PLACES = (
    "Give each token the position that it has along the tokens' axis, arange(t): angles (t, d / 2) fit q and k (b, h, t, d); "
    "before the transpose, (b, t, h, d), they must be (t, 1, d / 2). Turn keys as well as queries. A bias differs from key to "
    "key: -slope * (i - j)."
)
TURN = "Turn both, queries and keys, each by its own position: q, k = rotate(q, cos, sin), rotate(k, cos, sin)."
UNSURE = "the layer without its positions, where the order must not matter; nothing, where it makes positions as it runs"


class Row(NamedTuple):
    """A query i of sequence b, and the tokens that it may see beside its own, two at least."""

    b: int
    i: int
    others: list[int]


def look(case: Case) -> Iterator[Finding | Checked | Unknown]:
    """Whether an output moves when the tokens that its query sees change places, its own staying where it is."""
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
    """Queries that may see two tokens beside their own, not one before and one after, which distance does not tell apart."""
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
    """How far an output moves where each of its tokens takes the next one's place, and that beside other tokens there.

    None where other tokens do not move it either.
    """
    inputs, others = case.usual(), case.usual(9)
    first = 0 if case.subject.form == "x" else 1  # of a function the keys change places with their values
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
    """The share that is no rounding."""
    return SHARE.get(case.subject.dtype, COARSE)


def without(case: Case, rows: list[Row], name: str, told: str) -> Iterator[Finding | Unknown]:
    """What is said of positions that are held where the order does not matter: used for nothing, alike, or wrong."""
    what = f"whether the order of tokens is to matter: it does not, though it holds {name}"
    try:
        asking = other(case, positions.asked_for)
        inside = positions.entering(asking[1], asking[0].context(*case.usual())) if asking is not None else []
        drawn = other(case, positions.drawn)
        shares = [turned(drawn[0], row) for row in rows] if drawn is not None else []
        hidden = any(one is not None and one[1] > least(case) for one in shares)
    except (AskedError, RuntimeError):  # no way back, or numbers that cannot be written
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
    """The case of a changed copy of its module, and that copy; None where there is no copy that can be asked."""
    module, again = copied(case.subject), case.subject.again
    if module is None or again is None:
        return None
    changed = change(module)
    return case.within(replace(case.subject, call=again(changed)), case.shapes), changed


def mattering(case: Case, held: dict[str, Tensor], told: str) -> Iterator[Finding | Checked | Unknown]:
    """What is said where the order matters: by distance, where weights that show are the same further on."""
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
    elif case.identified is None:  # else the formula is known, which has no position in it, and its mistake is named
        yield Unknown(f"whether the order of tokens may matter: {told}, and no positions are found in it", UNSURE)


def plain(case: Case) -> bool:
    """Whether without what its positions do the same tokens have the same weights further on: one softmax of pairs."""
    try:
        still = other(case, positions.stilled)
        change = None if still is None else further(still[0])
    except (AskedError, RuntimeError):
        return False
    return change is not None and change < APART


def further(case: Case) -> float | None:
    """How much differences of log weights change where all tokens stand further on, the least of some shifts.

    A factor for a whole row, as of a temperature by place, is no change. None where weights do not show, or some are 0.
    """
    inputs = case.usual()
    if inputs[0].shape[-2] != inputs[-1].shape[-2] or inputs[0].shape[-2] <= max(SHIFTS) + 2:
        return None
    here = reading.weights_of(case, inputs)
    changes = [shifted(case, inputs, here, shift) for shift in SHIFTS] if here is not None else []
    told = [one for one in changes if one is not None]
    return min(told) if told and len(told) == len(changes) else None


def shifted(case: Case, inputs: tuple[Tensor, ...], weights: Tensor, shift: int) -> float | None:
    """The same for one shift."""
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
