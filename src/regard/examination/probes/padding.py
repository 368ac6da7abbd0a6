"""Check that no query sees a key that is padding."""

from collections.abc import Iterator

import torch
from torch import Tensor

from regard.examination import evidence, rules
from regard.examination.case import Case
from regard.examination.report import Checked, Finding, Unknown

CURE = (
    "Hide the padded keys before the softmax: scores.masked_fill(~real[:, None, None, :], -torch.inf), real (b, k) True where "
    "a token is."
)
WRONG_SIDE = (
    "The mask of the padding is turned round, or on the wrong side: hide the keys from each sequence's length on, and mind "
    "whether True means a token or padding to the function that takes it."
)


def look(case: Case) -> Iterator[Finding | Checked | Unknown]:
    """Check for a padding leak, and whether the real tokens are hidden instead."""
    padding = rules.padding(case.expects)
    if padding is None:
        return
    inputs = case.usual()
    b, q, k = case.expected(*inputs).shape
    hidden = padded(case, b, q, k) & real_queries(case, b, q, k)
    if not hidden.any():
        yield Unknown("whether padding is hidden", f"a sample with padding: no key of {k} is padding under {padding}")
        return
    leaks = hidden & case.reach.found
    if not leaks.any() and evidence.idle(case):
        return
    if not leaks.any():
        yield Checked("no query sees padding", evidence.sensitivity(case))
        return
    row = int(leaks.any(-1).any(-1).int().argmax())
    i = int(leaks[row].any(-1).int().argmax())
    j = int(case.reach.within[row, i].masked_fill(~leaks[row, i], 0).argmax())
    real = padding.lengths[row if len(padding.lengths) > 1 else 0]
    told = f"{evidence.seen(case, i, j, row)}, and token {j} of sequence {row}, which has {real}, is padding"
    instead = missing(case, row, i)
    if instead:
        told += f"; its real tokens {evidence.listed(instead)} are hidden instead"
    yield Finding("padding leak", told, WRONG_SIDE if instead else CURE, cause="padding")


def missing(case: Case, row: int, i: int) -> list[int]:
    """Return the real tokens that a query may see and does not."""
    expected = case.expected(*case.usual())
    return [int(j) for j in (expected & ~case.reach.found)[row, i].nonzero().flatten()]


def padded(case: Case, b: int, q: int, k: int) -> Tensor:
    """Return the keys that are padding, bool (b, q, k)."""
    padding = rules.padding(case.expects)
    return torch.zeros(b, q, k, dtype=torch.bool) if padding is None else ~rules.written(padding, b, q, k)


def real_queries(case: Case, b: int, q: int, k: int) -> Tensor:
    """Return the queries that are not padding themselves, bool (b, q, 1); the others are not checked."""
    padding = rules.padding(case.expects)
    if padding is None:
        return torch.ones(b, q, 1, dtype=torch.bool)
    return rules.written(padding, b, 1, k)[:, 0, k - q :].unsqueeze(-1)
