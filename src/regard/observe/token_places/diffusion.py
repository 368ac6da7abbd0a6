"""Which pixels a word of the prompt was drawn in: the attention of a diffusion model over its steps, as DAAM joins it.

Tang et al., What the DAAM: Interpreting Stable Diffusion Using Cross Attention, 2022, https://arxiv.org/abs/2210.04885: the
weights that each head of each cross attention gives a word are a picture of the latents; each is enlarged to the same size by
bicubic interpolation, and all are added up. Of a UNet the down and up blocks count, as in the paper. Where words and pixels are
one sequence, as in Stable Diffusion 3 and Flux, it is the part of self-attention by which pixels look at words.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.errors import ConfigError, ShapeError
from regard.mechanism.arguments import check_count, check_index, check_instance, check_integer, check_sequence
from regard.observe.recorded_runs.run import Call, Run
from regard.observe.recorded_runs.words import TextPair, split_rows
from regard.observe.recording import Recording
from regard.observe.token_places.places import EMPTY, PatchGrid, Place, select_places

MIDDLE = "mid_block"  # a component of the paths of the layers that are left out
LARGEST_SIDE = 2**14  # of a heat map
Sides = tuple[int, int]  # rows and columns


def word_heat_map(recording: Recording, word: int, size: tuple[int, int], row: int = -1) -> Tensor:
    """Return the DAAM heat map of a word, (height, width), in float64.

    The recording is of the denoising loop, all its steps. `word` is its position among the tokens of the prompt, `size`
    the height and width of the latents or of the image, and `row` the sequence of the batch: the last one by default, which
    with classifier-free guidance is that of the prompt. Values below 0, which bicubic interpolation makes, are set to 0 in each
    layer and head after the steps are added up, as in the authors' code.
    Where words and patches of the image are one sequence, `recording.places` states which are patches, and the words are the
    others, in order.
    Raises ConfigError without such attention, or if a layer of it calls attention several times in one forward (slices of
    the heads, an image beside the prompt), and ShapeError for one whose queries are no picture of these proportions.
    """
    check_instance("recording", recording, Recording)
    if len(check_sequence("size", size)) != 2:
        raise ConfigError(f"size must be (height, width); got {len(size)} numbers.")
    height, width = (check_count("size", one, most=LARGEST_SIDE) for one in size)
    total: dict[str, Tensor] = {}
    word, row = check_integer("word", word), check_integer("row", row)
    sides: dict[str, Sides | None] = {}
    for one in iterate_calls(recording):
        name, place = one.call.name, int(one.words[check_index("word", word, len(one.words), "the prompt")])
        sequence = check_index("row", row, one.call.map.shape[0], "the batch")
        weights = one.call.map[sequence, :, one.pixels, place].double()
        total[name] = weights if name not in total else total[name] + weights
        sides[name] = one.sides
    if not total:
        raise ConfigError(
            "no cross attention to the words of a prompt was recorded: record the denoiser, e.g. pipeline.unet. Where words "
            "and patches are one sequence, set recording.places = "
            "regard.PatchGrid(rows, columns, start=number of the first patch)."
        )
    found = torch.zeros(height, width, dtype=torch.float64)
    for name, weights in total.items():
        pictures = arrange_picture(weights, sides[name], height, width, name)
        found += F.interpolate(pictures[None], size=(height, width), mode="bicubic").clamp(min=0)[0].sum(0).cpu()
    return found


def list_prompt_words(recording: Recording, row: int = -1) -> list[str]:
    """Return the words of the prompt of a sequence of the batch, as `recording.tokens` has them; empty where it has others."""
    tokens = recording.tokens.columns if isinstance(recording.tokens, TextPair) else recording.tokens
    if tokens is None or isinstance(tokens, Tensor):
        return []
    rows = split_rows(tokens)
    if len(rows) > 1 and not -len(rows) <= row < len(rows):  # words of some sequences of a larger batch
        return []
    found = rows[row] if len(rows) > 1 else rows[0]
    for one in iterate_calls(recording):
        if len(found) == one.call.map.shape[3]:
            return [found[place] for place in one.words.tolist()]
        return [*found] if len(found) == len(one.words) else []
    return []


@dataclass(frozen=True, eq=False)
class PromptCall:
    """A call of pixels to words: which of its queries are pixels, row by row, and which of its keys are words.

    sides are the rows and columns of the pixels, None where they are not known.
    """

    call: Call
    pixels: Tensor
    words: Tensor
    sides: Sides | None


def iterate_calls(recording: Recording) -> Iterator[PromptCall]:
    """Yield each call by which pixels attend to words."""
    kind = "cross" if any(run.layers("cross") for run in recording.runs) else "self"
    for run in recording.runs:
        check_single_calls(run, kind)
        for call in run.softmax_calls:
            if call.kind == kind and MIDDLE not in call.name:
                found = read_call(call, select_places(recording.places, kind, call.name))
                if len(found.words):
                    yield found


def read_call(call: Call, places: Sequence[Place]) -> PromptCall:
    """Return which tokens of a call are pixels and words; no words where these are one sequence without a grid."""
    queries, keys = call.map.shape[2:]
    grid = places[0] if len(places) == 1 else None
    is_plain = isinstance(grid, PatchGrid) and grid.windows == 1
    if call.kind == "cross":
        is_known = is_plain and not grid.has_keys and grid.length == queries  # type: ignore[union-attr]
    else:
        is_known = is_plain and grid.has_queries and grid.has_keys and queries == keys  # type: ignore[union-attr]
    if not is_known:
        return PromptCall(call, torch.arange(queries), torch.arange(keys if call.kind == "cross" else 0), None)
    assert isinstance(grid, PatchGrid)
    patches = grid.locate_tokens(queries)[0]
    pixels = patches.argsort(stable=True)[(patches == EMPTY).sum() :]
    words = torch.arange(keys) if call.kind == "cross" else (patches == EMPTY).nonzero()[:, 0]
    return PromptCall(call, pixels, words, (grid.rows, grid.columns))


def check_single_calls(run: Run, kind: str) -> None:
    """Raise ConfigError if a layer makes several calls in one forward: some may be of other rows, or of no words."""
    for name, own, _, index in run.histories:
        if own == kind and MIDDLE not in name and index:
            raise ConfigError(
                f"{name} calls attention several times in one forward, for slices of its heads or for an image beside the "
                "prompt, so that a word cannot be told from its number: record without attention slicing and image prompts."
            )


def arrange_picture(weights: Tensor, sides: Sides | None, height: int, width: int, name: str) -> Tensor:
    """Return the weights (h, q) of queries that are a smaller picture of the same proportions, (h, rows, columns)."""
    n = weights.shape[-1]
    rows = round((n * height / width) ** 0.5) if sides is None else sides[0]
    if not rows or n % rows or abs(n // rows * height - rows * width) > max(height, width):
        known = f"{n} queries" if sides is None else f"{sides[0]} x {sides[1]} queries"
        raise ShapeError(f"the {known} of {name} are no picture with the proportions of {height} x {width}.")
    return weights.reshape(-1, rows, n // rows)
