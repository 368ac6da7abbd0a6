"""Sentences that state, in numbers, which output depends on which token."""

import torch

from regard.examination import dependency
from regard.examination.case import Case
from regard.examination.identify import weight_reading
from regard.examination.subject.restore_state import seed_generators

ALONE = (
    "the attention alone, without a residual, norm, rotary or activation, with projections named W_query, q_proj, to_q or qkv; "
    "or a module that also returns its weights, (context, weights); or a function (q, k, v) -> context"
)
NO_SOFTMAX = f"strict=False, if it is no softmax of scores by design; or {ALONE}"
SIZES = (1.0, 1 / 8, 1 / 64)  # of inputs
FAINT = 0.1  # of the largest dependence of an output
SENTENCE = ("Your", "journey", "starts", "with", "one", "step")


def get_token_words(case: Case) -> tuple[str, ...]:
    """Return a word for each token: the lectures' sentence if it has as many words, else the token numbers."""
    t = case.shapes.tokens
    return SENTENCE if t == len(SENTENCE) else tuple(str(j) for j in range(t))


def format_token(case: Case, j: int) -> str:
    """Format a token as its number, followed by its word if it has one."""
    found = get_token_words(case)[j]
    return f'{j} "{found}"' if found != str(j) else found


def measure_move(case: Case, i: int, j: int, b: int = 0, source: int | None = None) -> float:
    """Compute how far output i of sequence b moves when token j of that sequence, or of sequence `source`, is replaced.

    Small inputs are used if usual ones do not move it beyond rounding: then every key has weight.
    """
    return next((moved for size in SIZES if (moved := measure_move_of_size(case, i, j, b, source, size))), 0.0)


def measure_move_of_size(case: Case, i: int, j: int, b: int, source: int | None, size: float) -> float:
    """Compute the move for inputs of a size."""
    inputs, other = case.make_usual_inputs(3, size), case.make_usual_inputs(103, size)
    source = b if source is None else source
    seed_generators(0, case.subject.device)
    before = case.run_subject(*inputs)
    seed_generators(0, case.subject.device)
    after = case.run_subject(*dependency.replace_token(inputs, other, source, j))
    change = (get_sequence_rows(after.context, b)[i] - get_sequence_rows(before.context, b)[i]).abs()
    return float(change.max())


def get_sequence_rows(context: torch.Tensor, b: int) -> torch.Tensor:
    """Return the outputs of one sequence, (q, c), in float64."""
    return (context[b].transpose(0, 1).flatten(1) if context.dim() == 4 else context[b]).double()


def describe_dependency(case: Case, i: int, j: int, b: int = 0) -> str:
    """Describe how output i depends on token j in numbers.

    For example `row 0 "Your" puts 0.22 on token 3 "with"; changing token 3 moves output 0 by 0.41`.
    """
    weight = get_largest_weight(case, i, j, b)
    puts = (
        f"row {format_token(case, get_token_number(case, i))} puts {weight:.2g} on token {format_token(case, j)}; "
        if weight
        else ""
    )
    who = f"token {j}" if puts else f"token {format_token(case, j)}"
    whose = f"output {i}" if puts else f"output {format_token(case, get_token_number(case, i))}"
    strength = float(case.measured_dependency.within_sequence[b, i, j])
    faint = f" ({strength:.2g} of its largest dependence)" if strength < FAINT else ""
    moved = measure_move(case, i, j, b)
    if not moved:  # a dependence that only the gradient shows
        return f"{puts}the gradient of {whose} on {who} is {strength:.2g} of its largest on any token"
    return f"{puts}changing {who} moves {whose} by {moved:.2g}{faint}"


def get_token_number(case: Case, i: int) -> int:
    """Return the token number of query i; the first tokens may be keys only."""
    return i + case.shapes.gap


def get_largest_weight(case: Case, i: int, j: int, b: int) -> float | None:
    """Return the weight of a query on a key, the largest of any head; None if the subject returns no weights."""
    weights = weight_reading.get_returned_weights(case, case.make_usual_inputs(3))
    return None if weights is None else float(weights[b, :, i, j].max())


def format_numbers(numbers: list[int]) -> str:
    """Format numbers as `0`, `0 and 3`, `0, 3 and 5`, `0, 1, 2 and 9 more`."""
    shown = [str(n) for n in numbers[:4]] if len(numbers) <= 4 else [*map(str, numbers[:3]), f"{len(numbers) - 3} more"]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def explain_unread_calls(case: Case) -> tuple[str, str]:
    """Return why the calls of a layer do not show how scores become weights, in words, and what to pass."""
    recorded = case.recorded
    for matrix in recorded.matrices:
        if not matrix.softmaxes:
            return f"in {matrix.name or 'the layer'} it is {matrix.title}", NO_SOFTMAX
    for missed in recorded.missed:
        return f"in {missed.module or 'the layer'} {missed.reason}", NO_SOFTMAX
    for one in recorded.calls:
        where = one.name or "the layer"
        if one.is_stored_as_weights and one.call.v is not None and one.call.v.shape[-1] == 1:
            return f"in {where} heads have width 1, and products of single numbers do not tell what scores are made of", ALONE
        if one.is_stored_as_weights:
            return f"in {where} {one.call.note.partition(', so ')[0]}", ALONE
        if one.q_source is None or one.k_source is None:
            both = one.q_source is None and one.k_source is None
            who = "queries and keys" if both else "queries" if one.q_source is None else "keys"
            return f"in {where} {who} are neither outputs of projections nor rotations of them", ALONE
    return ("", ALONE) if recorded.calls else ("no attention call was recorded", ALONE)


def has_no_dependency(case: Case) -> bool:
    """Return whether no output depends on any token, so that nothing can be seen or hidden."""
    return not case.measured_dependency.strength.nan_to_num().any()


def describe_sensitivity(case: Case) -> str:
    """Describe the smallest dependence that would have been detected."""
    if case.measured_dependency.how == "gradients":
        return f"a dependence of {case.measured_dependency.threshold:.0e} of an output's largest would be detected"
    return (
        f"measured by replacing tokens: a relative change of {dependency.estimate_rounding(case.subject.dtype):.0e} in "
        "an output would be detected"
    )
