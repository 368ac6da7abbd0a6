"""Check that no query sees a token that comes after it, if the expectation hides it."""

from collections.abc import Iterator

from torch import Tensor

from regard.examination import evidence, rules
from regard.examination.case import Case
from regard.examination.report import Checked, Finding, Unknown

HIDE = (
    "Give every later key the score -inf before the softmax: scores = scores.masked_fill(torch.ones(t, t, "
    "dtype=torch.bool).triu(1), -torch.inf)."
)


def look(case: Case) -> Iterator[Finding | Checked | Unknown]:
    """Check for a future leak, and find the first query that has one and the later token that it sees most."""
    hidden = hidden_future(case)
    if not hidden.any():
        return
    leaks = hidden & case.reach.found
    if not leaks.any() and evidence.idle(case):
        return
    if not leaks.any():
        yield Checked("no query sees a later token", evidence.sensitivity(case))
        return
    b = int(leaks.any(-1).any(-1).int().argmax())
    i = int(leaks[b].any(-1).int().argmax())
    strength = case.reach.within[b, i].masked_fill(~leaks[b, i], 0)
    j = int(strength.argmax())
    how, cure = told(case, leaks[b], hidden[b])
    yield Finding("future leak", f"{evidence.seen(case, i, j, b)}, and token {j} comes later{how}", cure, cause="mask")


def hidden_future(case: Case) -> Tensor:
    """Return the later tokens that a query may not see, bool (b, q, k).

    Tokens that only padding hides are left out, and queries that may see nothing.
    """
    inputs = case.usual()
    expected = case.expected(*inputs)
    b, q, k = expected.shape
    rest = rules.without_padding(case.expects)
    if rest is None:
        return expected & False
    later = rules.later(q, k, case.offset).to(expected.device).expand(b, q, k)
    return later & ~rules.written(rest, b, q, k, case.offset) & expected.any(-1, keepdim=True)


def told(case: Case, leaks: Tensor, hidden: Tensor) -> tuple[str, str]:
    """Return what the leaks have in common, in words, and the cure."""
    measured = case.reach.measured[0].unsqueeze(-1) & hidden
    next_one = rules.later(leaks.shape[0], leaks.shape[1], case.offset).cumsum(-1) == 1
    if leaks.shape[-1] > 2 and (leaks == (measured & next_one)).all():
        return (
            " (each query sees one token too many)",
            f"The diagonal is one off: triu(diagonal=1) hides what comes later. {HIDE}",
        )
    weakest = float(case.reach.within[0][leaks].min()) if leaks.any() else 1.0
    if weakest < 1e-4:
        return " (faintly)", f"What hides a score is finite and too small, or it comes after the softmax. {HIDE}"
    every = bool((leaks == measured).all())
    return (" (every query sees every later token)" if every else ""), HIDE
