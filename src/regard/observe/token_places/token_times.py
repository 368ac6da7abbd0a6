"""Times of tokens in sound, from the cross attention of a speech model: dynamic time warping through the weights."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.errors import ConfigError
from regard.mechanism.arguments import check_choice, check_count, check_instance, check_integer, check_sequence, describe_value
from regard.observe.recorded_runs.run import Run
from regard.observe.recording import Recording
from regard.observe.token_places.places import CROSS, AudioFrames

Floats = npt.NDArray[np.float32]
DIAGONAL, DOWN, RIGHT = 0, 1, 2  # where the cheapest path to a cell comes from
MEDIAN_WIDTH = 7  # frames, of Whisper's filter
RULES = ("transformers", "openai")  # packages whose times of Whisper's words differ


def token_times(
    recording: Recording,
    heads: Sequence[tuple[int, int]] | None = None,
    *,
    prompt: int = 0,
    frames: int | None = None,
    median: int = MEDIAN_WIDTH,
    rule: str = "transformers",
) -> Tensor:
    """Return the time at which each token starts in the sound, in seconds, (b, q + 1), from cross attention.

    heads are pairs of layer and head; by default all heads of the second half of the decoder. The weights of the first `frames`
    frames of the encoder, normalized over the tokens and smoothed by a median over time, are averaged over the heads; the time
    of a token is where the cheapest monotonic path through them reaches it. The first `prompt` tokens are at 0, and the end is
    at the time of the last token. They are those of the last run: of sound longer than the model reads at once, they count from
    the start of the last part that it read.

    rule="transformers" gives the numbers of Whisper's `return_token_timestamps` in transformers: the path is through the rows
    that read the tokens after the prompt, normalized over these. rule="openai" gives those of the package openai-whisper
    (find_alignment), which are about one token earlier: its path is through the rows that chose the tokens, row p for token
    p + 1, normalized over all rows, of weights whose sum over `frames` is 1. It needs one forward over the prompt, the text and
    the token of its end, whose row is not on the path. Both make NaN of a frame that has the same weight from all tokens,
    here 0.
    Raises ConfigError if there is no cross attention to frames of sound: then set recording.places["cross"]; and for beams of
    which recording.last.rows does not name those that were returned.
    Source: Radford et al. 2022 and openai/whisper, timing.py.
    """
    is_openai = check_choice("rule", rule, RULES) == "openai"
    check_instance("recording", recording, Recording, "Record a model with regard.record(model).")
    count = len(recording.layers(CROSS))
    place = recording.axis_places(0, CROSS)[1] if count else []
    if not place or not isinstance(place[0], AudioFrames):
        raise ConfigError(
            "token_times needs cross attention to frames of sound; where the model's are not known, set "
            "recording.places = {'cross': regard.AudioFrames(seconds)}."
        )
    if check_count("median", median) % 2 == 0:
        raise ConfigError(f"median must be an odd number of frames, got {median}.")
    pairs = choose_heads(recording, count) if heads is None else [check_pair(one) for one in check_sequence("heads", heads)]
    if not pairs:
        raise ConfigError("heads must name at least one head as a pair (layer, head); got none.")
    weights = torch.cat([recording.map(layer, head, CROSS).dense() for layer, head in pairs], 1)  # (b, n, q, k)
    weights = weights[..., : None if frames is None else check_count("frames", frames)]
    b, _, q, _ = weights.shape
    found = torch.zeros(b, q + 1)
    prompt = check_count("prompt", prompt, int(is_openai))
    check_rows(recording.last, is_openai)
    for row in range(b if prompt < q else 0):
        if is_openai:
            mean = average_heads(weights[row] / weights[row].sum(-1, keepdim=True), median)[prompt - 1 : -1]
        else:
            mean = average_heads(weights[row, :, prompt:], median)
        times = align_tokens(-mean.double().cpu().numpy()) * place[0].seconds
        found[row, prompt:] = torch.tensor([*times, times[-1]])
    return found


def check_rows(run: Run, is_openai: bool) -> None:
    """Raise ConfigError if no row of a run is known to be a returned text, or if the rule needs one forward and it has more."""
    if is_openai and any(call.step for call in run.calls):
        raise ConfigError(
            "rule='openai' needs one forward over the prompt, the text and its end, as find_alignment runs it; got a run of "
            "several steps. Record model(mel, tokens)."
        )
    if run.parent_rows and not run.rows:
        raise ConfigError(
            "the rows of this run are beams, and which of them were returned is only known of `generate` in transformers. Find "
            "the row of recording.last.ids that begins with the returned tokens, and set recording.last.rows = [row]."
        )


def choose_heads(recording: Recording, count: int) -> list[tuple[int, int]]:
    """Return all heads of the second half of the layers."""
    return [(layer, head) for layer in range(count // 2, count) for head in recording.heads(layer, CROSS)]


def check_pair(pair: object) -> tuple[int, int]:
    """Return a pair of layer and head. Raises ConfigError for anything else."""
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise ConfigError(f"heads must be pairs of layer and head, like (3, 1); got {describe_value(pair)}.")
    return check_integer("layer", pair[0]), check_integer("head", pair[1])


def average_heads(weights: Tensor, median: int) -> Tensor:
    """Return weights (n, q, k), normalized over the tokens and smoothed over time, as the mean (q, k) over the heads.

    A frame that has the same weight from all tokens says nothing of them, and is 0.
    """
    mean, deviation = weights.mean(-2, keepdim=True), weights.std(-2, keepdim=True, unbiased=False)
    normal = torch.where(deviation == 0, 0, (weights - mean) / deviation)
    side = median // 2
    if normal.shape[-1] > side:
        padded = F.pad(normal, (side, side), mode="reflect") if side else normal
        normal = padded.unfold(-1, median, 1).sort().values[..., side]
    return normal.mean(0)


def align_tokens(costs: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Return the frame (q,) at which each token starts on the cheapest monotonic path through the costs (q, k).

    The sums are rounded to float32, and of equal ones the path to the right is chosen, as in openai/whisper.
    """
    steps = find_cheapest_steps(costs)
    row, column = costs.shape
    starts = np.zeros(row, dtype=np.int64)
    while row > 0 or column > 0:
        starts[row - 1] = column - 1  # the last frame to be written is the first of the token
        step = RIGHT if row == 0 else DOWN if column == 0 else steps[row, column]
        row -= step != RIGHT
        column -= step != DOWN
    return starts


def find_cheapest_steps(costs: npt.NDArray[np.float64]) -> npt.NDArray[np.int8]:
    """Return where the cheapest path to each cell comes from, (q + 1, k + 1), one antidiagonal of cells after another."""
    rows, columns = costs.shape
    total: Floats = np.full((rows + 1, columns + 1), np.inf, dtype=np.float32)
    steps = np.full(total.shape, RIGHT, dtype=np.int8)
    total[0, 0] = 0
    for diagonal in range(2, rows + columns + 1):
        i = np.arange(max(1, diagonal - columns), min(rows, diagonal - 1) + 1)
        j = diagonal - i
        before = np.stack([total[i - 1, j - 1], total[i - 1, j], total[i, j - 1]])
        step = np.where(
            (before[0] < before[1]) & (before[0] < before[2]),
            DIAGONAL,
            np.where((before[1] < before[0]) & (before[1] < before[2]), DOWN, RIGHT),
        )
        total[i, j] = costs[i - 1, j - 1] + before[step, np.arange(len(i))]
        steps[i, j] = step
    return steps
