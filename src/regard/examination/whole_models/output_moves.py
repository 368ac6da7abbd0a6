"""Which token moves which output of a model: change one token at a time."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.examination import evidence
from regard.examination.report import Visibility
from regard.examination.subject.adapters import SubjectError
from regard.examination.subject.token_model import TokenModel

TRIED = 16  # tokens to change, one at a time


@dataclass(frozen=True, eq=False)
class OutputMoves:
    """How far outputs move with tokens of a sequence, (q, n), which tokens, which one, and how far other sequences' move."""

    within: Tensor
    tokens: list[int]
    sequence: int = 0
    across: float = 0.0
    where: tuple[int, int, int] = (0, 0, 0)  # of `across`: the token, the sequence, its output


def measure_moves(model: TokenModel, outputs: Tensor, sequence: int = 0) -> OutputMoves:
    """Measure how far each output of a sequence moves with its tokens, and the most that another's moves."""
    t = model.ids.shape[1]
    tokens = sorted({round(n * (t - 1) / (TRIED - 1)) for n in range(TRIED)}) if t > TRIED else list(range(t))
    within, across, where = torch.zeros(t, len(tokens), dtype=torch.float64), 0.0, (0, 0, 0)
    for n, j in enumerate(tokens):
        after = model.run(replace_token(model, j, sequence))
        assert after is not None
        change = (after - outputs).abs_().amax(-1)  # (b, t)
        within[:, n] = change[sequence]
        change[sequence] = 0
        if float(change.max()) > across:
            across, where = float(change.max()), (j, *divmod(int(change.argmax()), t))
    return OutputMoves(within, tokens, sequence, across, where)


def replace_token(model: TokenModel, j: int, b: int = 0) -> Tensor:
    """Return the ids of a model with token j of sequence b replaced by another."""
    ids = model.ids.clone()
    tokens = ids.flatten(0, 1)
    others = tokens[(tokens != ids[b, j]).reshape(len(tokens), -1).any(-1)]
    if len(others):
        ids[b, j] = others[0]
    else:
        ids[b, j] = ids[b, j] + 1 if model.ids.is_floating_point() else max(int(ids[b, j]) - 1, 0)
    return ids


def has_tokens_first(model: TokenModel) -> bool:
    """Return whether sequences are independent along the second axis: a model of ids (t, b)."""
    ids = model.ids.clone()
    ids[:, 0] = torch.where(ids[:, 0] > 0, ids[:, 0] - 1, 1)
    try:
        before, after = model.run(), model.run(ids)
    except SubjectError:
        return False
    if before is None or after is None:
        return False
    return bool((after - before)[:, 1:].abs().max() <= model.estimate_noise(before))


def compute_closure(steps: Sequence[Tensor]) -> Tensor:
    """Return who may see whom through successive layers, bool (t, t), each of which also passes on a token's own vector."""
    meets = torch.eye(steps[0].shape[-1], dtype=torch.bool)
    for step in steps:
        meets = meets | ((step.float() @ meets.float()) > 0)
    return meets


def compute_lasting_closure(step: Tensor) -> Tensor:
    """Return who may see whom through any number of layers, bool (t, t)."""
    reach = compute_closure([step])
    while not torch.equal(further := compute_closure([reach, reach]), reach):
        reach = further
    return reach


def make_visibility(meets: Tensor, found: Tensor, moved: OutputMoves, least: float) -> Visibility:
    """Return the picture of the tokens that were changed."""
    strength = moved.within[moved.tokens]
    words = tuple(str(j) for j in moved.tokens)
    if words == tuple(str(n) for n in range(len(evidence.SENTENCE))):
        words = evidence.SENTENCE
    expected = meets[moved.tokens][:, moved.tokens]
    return Visibility(expected, found[moved.tokens], strength / strength.amax(-1, keepdim=True).clamp_min(least), words)
