"""Check that heads are independent, and that each head of keys serves its own heads of queries."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from regard.examination import evidence
from regard.examination.call_checks import head_checks
from regard.examination.case import Case
from regard.examination.identify import mistakes, weight_reading
from regard.examination.identify.match import Match
from regard.examination.identify.mistakes import SPLIT, describe_mixed_heads
from regard.examination.report import Checked, Finding, Unknown

WHAT = "heads are independent"
APART = "Keep the axis of heads separate in every product and view: q, k and v are (b, h, t, d) throughout."


def check_case(case: Case) -> Iterator[Finding | Checked | Unknown]:
    """Check the heads by the identified formula, or else which heads of a function's output depend on which of its inputs."""
    match = case.match
    if match is not None:
        yield from check_match(match, case.subject.module)
    elif case.subject.form == "x":
        result = head_checks.check_heads(case.inner_calls)
        yield result if result is not None else Unknown(f"whether {WHAT}", evidence.ALONE)
    elif case.shapes.heads > 1:
        try:
            yield from check_function(weight_reading.get_double_case(case))
        except Exception:  # whatever a user's function raises: another probe reports it
            return


def check_match(match: Match, module: nn.Module | None) -> Iterator[Finding | Checked | Unknown]:
    """Yield results about heads from the identified formula, and from what the module states of them."""
    exchanged = head_checks.describe_exchanged_axes(module, match.heads, match.width)
    if exchanged:
        yield Finding("mixed heads", f"{exchanged}. The layer {mistakes.describe_equality(match)}", SPLIT, 2.4, "heads")
        return
    fields = ("split", "merge", "share")
    yield from mistakes.list_mistakes(match, fields, 2.4)
    if any(match.has_deviation(field) for field in fields) or match.heads == 1:
        return
    if all(match.is_verified(field) for field in fields):
        yield Checked(f"{WHAT}: {mistakes.format_heads(match)}", mistakes.describe_equality(match))
    else:
        yield Unknown(f"whether {WHAT}: other splits give the same outputs", "a layer whose weights are not zero")


def check_function(case: Case) -> Iterator[Finding | Checked]:
    """Check which heads of the output move with each head of q, of k and of v."""
    h, g = case.shapes.heads, case.shapes.groups
    for name, place, count in (("q", 0, h), ("k", 1, g), ("v", 2, g)):
        found = torch.stack([find_moving_heads(case, place, n) for n in range(count)])  # (h or g, h)
        own = torch.arange(h) // (h // count) == torch.arange(count)[:, None]
        if not (found & ~own).any():
            continue
        if name != "q" and 1 < g < h and torch.equal(found, torch.arange(h) % count == torch.arange(count)[:, None]):
            wrong = describe_mixed_heads("tiled")
            yield Finding(wrong.kind, f"{describe_move(name, found & ~own)}: {wrong.does}", wrong.cure, 1.6, "heads")
        else:
            yield Finding(
                "mixed heads", f"{describe_move(name, found & ~own)}, which should not depend on it", APART, 1.2, "heads"
            )
        return
    yield Checked(WHAT, f"a change of {weight_reading.get_tolerance(case):.0e} in another head would be detected")


def find_moving_heads(case: Case, place: int, n: int) -> Tensor:
    """Return which heads (h,) of the output move if head n of one input is replaced."""
    inputs, other = list(case.make_usual_inputs(0)), case.make_usual_inputs(7)
    before = case.run_subject(*inputs).context.double()
    inputs[place] = inputs[place].clone()
    inputs[place][:, n] = other[place][:, n]
    change = (case.run_subject(*inputs).context.double() - before).abs().nan_to_num().amax((0, 2, 3)).cpu()
    return change > weight_reading.get_tolerance(case) * float(before.abs().nan_to_num().max())


def describe_move(name: str, wrong: Tensor) -> str:
    """Describe the first wrong dependence: `changing head 1 of k moves head 3 of the output`."""
    n, h = wrong.nonzero()[0].tolist()
    return f"changing head {n} of {name} moves head {h} of the output"
