"""Tell whether outputs depend on the place of a sequence in its batch, as where positions are counted along the batch."""

from collections.abc import Iterator

import torch
from torch import Tensor

from regard.examination.report import Finding
from regard.examination.subject.adapters import SubjectError
from regard.examination.subject.token_model import TokenModel
from regard.examination.whole_models.model_lengths import draw_ids

BATCH = 3  # sequences: what is given to each of two, as a class or a time step, does not fit
NEAR = {torch.float64: 1e-6, torch.float32: 1e-4}  # of the largest output
COARSE = 0.03  # in half precision
ALONG = (
    "Count positions along the axis of tokens: pe[:, : x.shape[1]] or positions(torch.arange(x.shape[1])) for x (b, t, c). "
    "A module of positions for (t, b, c) gets x.transpose(0, 1)."
)


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


def check_model(model: TokenModel) -> Iterator[Finding]:
    """Yield the finding of a model whose outputs depend on the place of a sequence in its batch."""
    ids = torch.cat([draw_ids(model, model.ids.shape[1], seed) for seed in range(BATCH)])
    try:
        outputs, again, turned = model.run(ids), model.run(ids), model.run(ids.roll(1, 0))
    except SubjectError:  # it is made for another batch
        return
    if outputs is not None and again is not None and turned is not None:
        moved = measure_moves(outputs, again, turned)
        yield from [report_places(moved)] if moved else []
