"""Check that no query sees a token that comes after it, if the expectation hides it."""

from collections.abc import Iterator

from torch import Tensor

from regard.examination import evidence, mask_requirements
from regard.examination.case import Case
from regard.examination.report import Checked, Finding, Unknown

HIDE = (
    "Set the score of every later key to -inf before the softmax: scores = scores.masked_fill(torch.ones(t, t, "
    "dtype=torch.bool).triu(1), -torch.inf)."
)
NO_MASK = "If no mask is intended, pass expects=Everything(); on the command line, --expects none."


def check_case(case: Case) -> Iterator[Finding | Checked | Unknown]:
    """Check for a future leak, and find the first query that has one and the later token that it sees most."""
    hidden = find_hidden_future(case)
    if not hidden.any():
        return
    leaks = hidden & case.measured_dependency.visible
    if not leaks.any() and evidence.has_no_dependency(case):
        return
    if not leaks.any():
        yield Checked("no query sees a later token", evidence.describe_sensitivity(case))
        return
    b = int(leaks.any(-1).any(-1).int().argmax())
    i = int(leaks[b].any(-1).int().argmax())
    strength = case.measured_dependency.within_sequence[b, i].masked_fill(~leaks[b, i], 0)
    j = int(strength.argmax())
    how, cure = describe_leaks(case, leaks[b], hidden[b])
    mixing = case.mixing_function
    if mixing is not None:
        how, cure = f"; {mixing.describe()} carries tokens back", mixing.cure
    yield Finding(
        "future leak", f"{evidence.describe_dependency(case, i, j, b)}, and token {j} comes later{how}", cure, cause="mask"
    )


def find_hidden_future(case: Case) -> Tensor:
    """Return the tokens that are hidden from a query because they come later, bool (b, q, k), if it may see any."""
    expected = case.get_expected_visibility(*case.make_usual_inputs())
    future = mask_requirements.find_future(case.expects, expected.shape, case.offset).to(expected.device)
    return future & expected.any(-1, keepdim=True)


def describe_leaks(case: Case, leaks: Tensor, hidden: Tensor) -> tuple[str, str]:
    """Return what the leaks have in common, in words, and the cure."""
    measured = case.measured_dependency.measured_rows[0].unsqueeze(-1) & hidden
    next_one = mask_requirements.make_later_table(leaks.shape[0], leaks.shape[1], case.offset).cumsum(-1) == 1
    if leaks.shape[-1] > 2 and (leaks == (measured & next_one)).all():
        return (
            " (each query sees one token too many)",
            f"The diagonal is off by one: triu(diagonal=1) hides the later tokens. {HIDE}",
        )
    weakest = float(case.measured_dependency.within_sequence[0][leaks].min()) if leaks.any() else 1.0
    if weakest < 1e-4:
        return " (weakly)", f"Hidden scores are finite and not low enough, or the mask is applied after the softmax. {HIDE}"
    every = bool((leaks == measured).all())
    return (" (every query sees every later token)", f"{HIDE} {NO_MASK}") if every else ("", HIDE)
