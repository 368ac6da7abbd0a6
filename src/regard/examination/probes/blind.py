"""Check that no row of the output is NaN, and that a query that may see nothing sees nothing."""

from collections.abc import Iterator

from torch import Tensor, nn

from regard.examination import evidence, mask_requirements
from regard.examination.case import Case
from regard.examination.report import Checked, Finding, Unknown

NAN = (
    "The softmax of a row of only -inf is NaN. Hide keys (the last axis), never queries, and let each query see at least one "
    "token; if it may see none, set its weights to 0: weights.masked_fill(~mask.any(-1, keepdim=True), 0)."
)
ALL, HUGE = "every output", 1e15  # the cause if no output is finite; no weight is larger
UNIFORM = (
    "With a finite number instead of -inf, a query that may see nothing sees every token equally. Set its weights to 0: "
    "weights.masked_fill(~mask.any(-1, keepdim=True), 0)."
)


def check_case(case: Case) -> Iterator[Finding | Checked | Unknown]:
    """Check for a blind row: a row that is not finite, or a query that may see nothing and still sees something."""
    unusable = report_unusable_weights(case)
    if unusable is not None:
        yield unusable
        return
    inputs = case.make_usual_inputs()
    context = case.compute_context(*inputs).detach().cpu()
    expected = case.get_expected_visibility(*inputs)
    broken = ~context.isfinite().all(-1)  # (b, q)
    if broken.any():
        yield report_nonfinite_row(case, context, broken, expected)
        return
    seeing = find_unexpected_keys(case, expected)
    if seeing.any():
        b = int(seeing.any(-1).any(-1).int().argmax())
        i = int(seeing[b].any(-1).int().argmax())
        keys = [int(j) for j in seeing[b, i].nonzero().flatten()]
        sentence = (
            f"row {i} may see nothing, but sees {len(keys)} of {seeing.shape[-1]} tokens: {evidence.format_numbers(keys)}"
        )
        yield Finding("blind row", sentence, UNIFORM, cause="blind")
        return
    empty = int((~expected.any(-1)).sum())
    what = "every output is finite" + (f", and {empty} rows that may see nothing see nothing" if empty else "")
    yield Checked(what, f"in {broken.numel()} rows of ordinary inputs")


def report_nonfinite_row(case: Case, context: Tensor, broken: Tensor, expected: Tensor) -> Finding:
    """Return the finding of a row that is not finite, or of weights that are not."""
    b = int(broken.any(-1).int().argmax())
    rows = [int(i) for i in broken[b].nonzero().flatten()]
    i = rows[0]
    kind = "NaN" if context[b, i].isnan().any() else "inf"
    if len(rows) == broken.shape[1]:
        sentence = f"every row {'of the output' if broken.all() else f'of sequence {b}'} is {kind}"
    else:
        sentence = (
            f"row {evidence.format_token(case, evidence.get_token_number(case, i))} is {kind}"
            if len(rows) == 1
            else f"rows {evidence.format_numbers(rows)} are {kind}"
        )
    may = int(expected[b, i].sum())
    sentence += (
        f"; row {i} may see {may} of {expected.shape[-1]} tokens"
        if may
        else f"; row {i} may see nothing, so its context should be 0"
    )
    return Finding("blind row", sentence, NAN, strength=1.1, cause=ALL if broken.all() and expected.any(-1).all() else "blind")


def report_unusable_weights(case: Case) -> Finding | None:
    """Return the finding of weights that hold NaN, inf, or numbers that no weight has; None if there are none."""
    weights = [] if case.subject.module is None else find_unusable_weights(case.subject.module)
    if not weights:
        return None
    sentence = f"{weights[0]} contains NaN, inf or numbers above {HUGE:.0e}"
    return Finding("blind row", sentence, "Initialize, load or train the weights: torch.empty leaves them unset.", 1.5, ALL)


def find_unusable_weights(module: nn.Module) -> list[str]:
    """Return the names of weights that hold NaN, inf, or numbers too large for any weight."""
    named = (one for one in module.named_parameters() if one[1].is_floating_point())
    return [name for name, one in named if not bool((one.detach().abs() < HUGE).all())]


def find_unexpected_keys(case: Case, expected: Tensor) -> Tensor:
    """Return what queries that may see nothing see, (b, q, k), other than their own token, which a residual passes on."""
    _, q, k = expected.shape
    own = (
        mask_requirements.make_own_table(q, k, case.offset).expand_as(expected)
        if case.subject.form == "x"
        else expected & False
    )
    return case.measured_dependency.visible & ~own & ~expected.any(-1, keepdim=True)
