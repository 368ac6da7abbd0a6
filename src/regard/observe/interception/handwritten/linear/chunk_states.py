"""The recurrence of the chunks of linear attention: decays between chunks are solved for from the layer's own outputs."""

from typing import NamedTuple

import torch
from torch import Tensor

from regard.map.linear_recurrence import GONE, LinearRecurrence
from regard.mechanism.scores import score_dtype
from regard.observe.interception.handwritten.recurrences.loop_check import compare_outputs
from regard.observe.interception.plain_tensors import UnreadableError
from regard.observe.interception.recurrent.recurrence_call import RecurrenceFactors, sample_state

UNCARRIED = "nothing of it comes from earlier chunks"
GROWS = "its states are multiplied by more than 1"
FEW = "its chunks have too few outputs to tell what their states decay by"
SPARE = 2  # outputs of a chunk for each decay that is solved for, at least
NOISE_ROUNDINGS, MOST_NOISE = 2**10, 2.0**-5  # of a decay above 1, or of the outputs of a chunk, less than which is nothing


class Chunk(NamedTuple):
    """The tokens of a chunk: q, k (b, h, n, d), v (b, h, n, e), and their output (b, h, n, e) with earlier chunks.

    own is what multiplies q_i · k_i, and decays that of a token and the one before over it, both (b or 1, h or 1, n).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    own: Tensor
    decays: Tensor
    outputs: Tensor


def join_chunks(
    chunks: list[Chunk], has_several: bool, length: int, initial: Tensor | None = None, must_carry: bool = True
) -> RecurrenceFactors:
    """Return the recurrence of chunks, cut to a length, with one decay for each feature between chunks, or one for all.

    It starts from an initial state (b, h, d, e), if there is one.

    Raises UnreadableError if it differs from the outputs, or if a chunk must read something of earlier ones and does not.
    """
    dtype = score_dtype(chunks[0].outputs.dtype)
    q, k, v, own, outputs = (
        torch.cat([getattr(one, name) for one in chunks], 2)[:, :, :length] for name in ("q", "k", "v", "own", "outputs")
    )
    parts, left, is_carried = solve_decays(chunks, has_several, initial)
    if must_carry and not is_carried:
        raise UnreadableError(UNCARRIED)
    decays = torch.cat(parts, 2)[:, :, :length]  # (b, h, t, 1 or d)
    most = 1 + find_noise(outputs.dtype)
    if bool((decays > most).any()):  # factors of the rows, not of the keys
        before = torch.cat([own[:, :, :1], own[:, :, :-1]], 2)
        decays, q, own = decays * (before / own).unsqueeze(3), q * own.unsqueeze(3).to(q.dtype), torch.ones_like(own)
    grows = bool((decays > most).any())
    logs = decays.clamp(0, None if grows else 1).log().clamp(min=GONE).to(dtype)
    scale = None if bool((own == 1).all()) else own.to(dtype)
    mechanism = LinearRecurrence(decay=logs.contiguous(), q=q.contiguous(), k=k.contiguous(), key_scale=scale)
    compare_outputs(mechanism, v, outputs, initial)
    if grows:
        raise UnreadableError(GROWS)
    return RecurrenceFactors(mechanism, v.contiguous(), outputs, sample_state(left.to(outputs.dtype)))


def find_noise(dtype: torch.dtype) -> float:
    """Return what rounding may leave of a number near 1 in the outputs of a dtype."""
    return min(NOISE_ROUNDINGS * torch.finfo(dtype).eps, MOST_NOISE)


def solve_decays(chunks: list[Chunk], has_several: bool, initial: Tensor | None) -> tuple[list[Tensor], Tensor, bool]:
    """Return the decays (b, h, n, 1 or d) of chunks, the state left, and whether a chunk reads anything of earlier ones.

    The outputs show the decays of first tokens: that of all is 1 without an initial state. All are float64. Raises
    UnreadableError if a chunk has too few outputs to solve for decays.
    """
    (b, h, _, d), found, is_carried = chunks[0].q.shape, [], False
    least = find_noise(chunks[0].outputs.dtype)
    state = None if initial is None else initial.double()
    for chunk in chunks:
        q, k, v, own, decays, outputs = (x.double() for x in chunk)
        n, e = v.shape[2:]
        logs = decays.log().clamp(min=GONE).cumsum(2)
        reach = logs.exp()  # of the first token of the chunk to each
        decays = decays.expand(b, h, -1).unsqueeze(3).expand(-1, -1, -1, d if has_several else 1).clone()
        pairs = (logs.unsqueeze(3) - logs.unsqueeze(2)).exp().tril() * own.unsqueeze(2)
        written = k * pairs[:, :, -1].unsqueeze(3)
        if state is not None:
            rest, queries = outputs - (q @ k.mT * pairs) @ v, q * reach.unsqueeze(3)
            if has_several and n * e < SPARE * d:
                raise UnreadableError(FEW)
            factor = solve_features(queries, state, rest) if has_several else solve_number(queries, state, rest)
            decays[:, :, 0] = factor
            is_carried |= bool((queries @ (factor.unsqueeze(3) * state)).norm() > least * outputs.norm())
            state = factor.unsqueeze(3) * state * reach[:, :, -1, None, None]
        found.append(decays)
        state = written.mT @ v + (0 if state is None else state)
    assert state is not None
    return found, state, is_carried


def solve_number(queries: Tensor, state: Tensor, rest: Tensor) -> Tensor:
    """Return the number (b, h, 1) by which queries times a state is nearest to the rest of the outputs."""
    read = queries @ state
    size = read.square().sum((2, 3))
    return ((read * rest).sum((2, 3)) / torch.where(size > 0, size, 1)).unsqueeze(2)


def solve_features(queries: Tensor, state: Tensor, rest: Tensor) -> Tensor:
    """Return the numbers (b, h, d) for the rows of a state, by which queries times it is nearest to the rest of the outputs."""
    size = torch.linalg.vector_norm(state, dim=3) * torch.linalg.vector_norm(queries, dim=2)
    size = torch.where(size > 0, size, 1)
    normal = (queries.mT @ queries) * (state @ state.mT) / (size.unsqueeze(2) * size.unsqueeze(3))
    inverse, found = torch.linalg.pinv(normal, hermitian=True), torch.zeros_like(size)
    for _ in range(3):  # the second and third round correct what rounding leaves
        error = rest - queries @ (found.unsqueeze(3) * state)
        target = ((queries.mT @ error) * state).sum(3) / size
        found = found + (inverse @ target.unsqueeze(3)).squeeze(3) / size
    return found
