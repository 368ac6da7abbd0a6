"""Beam search: the continuation of the greatest score found while keeping a few at a time.

It takes a step function, and so works with any model that continues from a state, a translator as well as GPT-2.
Early stopping follows the default rule of transformers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from regard.errors import ConfigError
from regard.mechanism.arguments import check_number, describe_value

Step = Callable[[Tensor, list[int]], Tensor]  # parents (r,) among the previous rows, and their tokens, to (r, n)
MAX_BEAMS = 2**16  # most beams
MAX_LENGTH_PENALTY = 32.0  # largest length penalty: every length to this power fits a float
CANDIDATES_PER_BEAM = 4  # candidates considered for each beam, since some of them may end


@dataclass(frozen=True)
class Hypothesis:
    """The tokens of a sequence, its end among them, and its score: log-probability / length ** length_penalty."""

    tokens: list[int]
    score: float


@dataclass
class RowSearch:
    """The search of one sequence: the running sequences with the sums of their log-probabilities, and the finished ones."""

    running: list[tuple[float, list[int]]] = field(default_factory=lambda: [(0.0, [])])
    finished: list[Hypothesis] = field(default_factory=list)
    is_done: bool = False


def search_beams(
    first: Tensor,
    step: Step,
    beams: int,
    longest: int | Sequence[int],
    ended: Callable[[Sequence[int]], bool],
    length_penalty: float = 1.0,
) -> list[list[Hypothesis]]:
    """Return the best sequences of each row, at most `beams`, best first.

    first are the log-probabilities (b, n) of a first token. `step` reads one token for each of the rows that continue previous
    rows, (b,) at first and (b beams,) from then on, and returns the log-probabilities of the next. `longest` is the most tokens
    of a sequence, which ends there as well, for all rows or for each. `ended` returns whether a sequence has ended.
    """
    rows = [RowSearch() for _ in first]
    limits = [longest] * len(rows) if isinstance(longest, int) else longest
    scores = first.unsqueeze(1)  # (b, 1 or beams, n)
    for length in range(1, max(limits) + 1):
        parents, tokens = [], []
        for number, (row, theirs, limit) in enumerate(zip(rows, scores, limits, strict=True)):
            survivors = advance_row(row, theirs, beams, length, length == limit, ended, length_penalty)
            parents += [number * len(theirs) + parent for parent in survivors]
            tokens += [sequence[-1] for _, sequence in row.running]
        if all(row.is_done for row in rows):
            break
        scores = step(torch.tensor(parents), tokens).view(len(rows), beams, -1)
    return [row.finished for row in rows]


def advance_row(
    row: RowSearch,
    scores: Tensor,
    beams: int,
    length: int,
    last: bool,
    ended: Callable[[Sequence[int]], bool],
    length_penalty: float,
) -> list[int]:
    """Advance a row by one token, given scores (beams, n); return the parent of each running sequence."""
    sums = scores.double() + torch.tensor([[score] for score, _ in row.running], device=scores.device, dtype=torch.float64)
    best = sums.flatten().topk(min(CANDIDATES_PER_BEAM * beams, sums.numel()))
    n = scores.shape[-1]
    running: list[tuple[float, list[int]]] = []
    survivors: list[int] = []
    for rank, (score, place) in enumerate(zip(best.values.tolist(), best.indices.tolist(), strict=True)):
        parent, token = divmod(place, n)
        sequence = [*row.running[parent][1], token]
        if last or ended(sequence):
            if rank < beams and not row.is_done and score > float("-inf"):
                row.finished.append(Hypothesis(sequence, score / length**length_penalty))
        elif len(running) < beams:
            running.append((score, sequence))
            survivors.append(parent)
    row.finished = sorted(row.finished, key=lambda one: -one.score)[:beams]
    while len(running) < beams:  # all others have ended, or the vocabulary is small: pad with rows of probability 0
        running.append((float("-inf"), [*row.running[0][1], 0]))
        survivors.append(0)
    row.running = running
    hope = running[0][0] / length**length_penalty
    row.is_done = row.is_done or (len(row.finished) == beams and hope <= row.finished[-1].score) or hope == float("-inf")
    return survivors


def check_penalty(value: float) -> None:
    """Raise ConfigError if a length penalty is not a number from -32 to 32."""
    if not abs(check_number("length_penalty", value)) <= MAX_LENGTH_PENALTY:
        raise ConfigError(
            f"length_penalty must be from {-MAX_LENGTH_PENALTY:g} to {MAX_LENGTH_PENALTY:g}, got {describe_value(value)}."
        )
