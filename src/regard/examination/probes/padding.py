"""Check that no query sees a key that is padding."""

from collections.abc import Iterator

import torch
from torch import Tensor

from regard.examination import evidence, mask_requirements
from regard.examination.case import Case
from regard.examination.report import Checked, Finding, Unknown

CURE = (
    "Hide the padded keys before the softmax: scores.masked_fill(~real[:, None, None, :], -torch.inf), with real (b, k) True "
    "for tokens and False for padding."
)
WRONG_SIDE = (
    "The padding mask is inverted, or on the wrong side: hide the keys that are padding and no others, and check whether True "
    "means a token or padding in the function that takes the mask."
)


def check_case(case: Case) -> Iterator[Finding | Checked | Unknown]:
    """Check for a padding leak, and whether the real tokens are hidden instead."""
    padding = case.expects.padding
    if padding is None:
        return
    inputs = case.make_usual_inputs()
    b, q, k = case.get_expected_visibility(*inputs).shape
    hidden = find_padded_keys(case, b, q, k) & mask_requirements.find_real_queries(case.expects, b, q, k)
    if not hidden.any():
        yield Unknown("whether padding is hidden", f"a sample with padding: with {padding}, none of the {k} keys is padding")
        return
    leaks = hidden & case.measured_dependency.visible
    if not leaks.any() and evidence.has_no_dependency(case):
        return
    if not leaks.any():
        yield Checked("no query sees padding", evidence.describe_sensitivity(case))
        return
    row = int(leaks.any(-1).any(-1).int().argmax())
    i = int(leaks[row].any(-1).int().argmax())
    j = int(case.measured_dependency.within_sequence[row, i].masked_fill(~leaks[row, i], 0).argmax())
    real = padding.padded_lengths[row if len(padding.padded_lengths) > 1 else 0]
    sentence = (
        f"{evidence.describe_dependency(case, i, j, row)}, and token {j} of sequence {row}, which has length {real}, is padding"
    )
    instead = find_missing_tokens(case, row, i)
    if instead:
        sentence += f"; its real tokens {evidence.format_numbers(instead)} are hidden instead"
    yield Finding("padding leak", sentence, WRONG_SIDE if instead else CURE, cause="padding")


def find_missing_tokens(case: Case, row: int, i: int) -> list[int]:
    """Return the real tokens that a query may see and does not."""
    expected = case.get_expected_visibility(*case.make_usual_inputs())
    return [int(j) for j in (expected & ~case.measured_dependency.visible)[row, i].nonzero().flatten()]


def find_padded_keys(case: Case, b: int, q: int, k: int) -> Tensor:
    """Return the keys that are padding, bool (b, q, k)."""
    padding = case.expects.padding
    return torch.zeros(b, q, k, dtype=torch.bool) if padding is None else ~mask_requirements.expand_mask(padding, b, q, k)
