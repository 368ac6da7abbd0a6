"""Check that the sequences of a batch do not see one another, and that their places in it do not matter."""

from collections.abc import Iterator

import torch
from torch import Tensor

from regard.examination import evidence
from regard.examination.case import Case
from regard.examination.report import Checked, Finding, Unknown
from regard.examination.subject.adapters import SubjectError

CURE = (
    "Keep the batch on its own axis: torch modules take (t, b, c) unless batch_first=True, and view or reshape must not mix "
    "the first two axes. Scores are (b, h, q, k): q @ k.transpose(-2, -1)."
)
BATCH = 3  # sequences: what is given to each of two, as a class or a time step, does not fit
NEAR = {torch.float64: 1e-6, torch.float32: 1e-4}  # of the largest output
COARSE = 0.03  # in half precision
ALONG = (
    "Count positions along the axis of tokens: pe[:, : x.shape[1]] or positions(torch.arange(x.shape[1])) for x (b, t, c). "
    "A module of positions for (t, b, c) gets x.transpose(0, 1)."
)


def check_case(case: Case) -> Iterator[Finding | Checked | Unknown]:
    """Check for a batch leak, and find which sequence moves which."""
    if not case.subject.is_batched:
        return
    if case.shapes.batch < 2:
        yield Unknown("whether the sequences of a batch depend on one another", "a sample of two sequences")
        return
    if evidence.has_no_dependency(case):
        return
    across = case.measured_dependency.across_sequences
    if not (across > case.measured_dependency.threshold).any():
        moved = measure_places(case) if case.can_resize else 0.0
        if moved:
            yield report_places(moved)
        else:
            yield Checked("no sequence depends on another one of its batch", evidence.describe_sensitivity(case))
        return
    b, other = divmod(int(across.argmax()), len(across))
    strength = case.measured_dependency.strength[b, :, other].nan_to_num()
    i, j = divmod(int(strength.argmax()), strength.shape[1])
    moved = evidence.measure_move(case, i, j, b, other)
    sentence = f"changing token {j} of sequence {other} moves output {i} of sequence {b}{f' by {moved:.2g}' if moved else ''}"
    yield Finding("batch leak", sentence, CURE, strength=1.2, cause="batch")


def measure_places(case: Case) -> float:
    """Return how far outputs differ if the sequences of a larger batch change places; 0 if they do not, or it is refused."""
    inputs = case.make_inputs(None, BATCH, 21)
    try:
        outputs, again = (case.compute_seeded_context(*inputs, seed=seed) for seed in (0, 1))
        turned = case.compute_seeded_context(*(x.roll(1, 0) for x in inputs))
    except SubjectError:  # it is made for another batch
        return 0.0
    return measure_moves(outputs, again, turned)


def measure_moves(outputs: Tensor, again: Tensor, turned: Tensor) -> float:
    """Return how far outputs (b, t, c) differ from those of sequences that each took the next place, `turned`.

    0 unless all sequences differ, and if `again`, with other random numbers, is not the same.
    """
    largest = float(outputs.abs().max())
    moves = (turned - outputs.roll(1, 0)).abs().flatten(1).amax(1)
    near = NEAR.get(outputs.dtype, COARSE) * largest
    is_random = bool((again - outputs).abs().max() > near)
    return 0.0 if is_random or not bool((moves > near).all()) else float(moves.max())


def report_places(moved: float) -> Finding:
    """Return the finding of outputs that depend on the place in the batch."""
    sentence = f"the same sequence gives other outputs in another place of its batch, by up to {moved:.2g}"
    return Finding("wrong positions", f"{sentence}: something is counted along the batch", ALONG, 1.3, "positions")
