"""Which pixels a word of the prompt was drawn in: the cross attention of a diffusion model over its steps, as DAAM joins it.

Tang et al., What the DAAM: Interpreting Stable Diffusion Using Cross Attention, 2022, https://arxiv.org/abs/2210.04885: the
weights that each head of each cross attention gives a word are a picture of the latents; each is enlarged to the same size by
bicubic interpolation, and all are added up. Of a UNet the down and up blocks count, as in the paper.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.errors import ConfigError, ShapeError
from regard.mechanism.arguments import check_count, check_index, check_instance, check_integer, check_sequence
from regard.observe.recording import Recording
from regard.observe.run import Run

MIDDLE = "mid_block"  # a component of the paths of the layers that are left out
LARGEST_SIDE = 2**14  # of a heat map


def word_heat_map(recording: Recording, word: int, size: tuple[int, int], row: int = -1) -> Tensor:
    """Return the DAAM heat map of a word, (height, width), in float64.

    The recording is of the denoising loop, all its steps. `word` is its position among the tokens of the prompt, `size`
    the height and width of the latents or of the image, and `row` the sequence of the batch: the last one by default, which
    with classifier-free guidance is that of the prompt. Values below 0, which bicubic interpolation makes, are set to 0 in each
    layer and head after the steps are added up, as in the authors' code.
    Raises ConfigError without cross attention, or if a layer of it calls attention several times in one forward (slices of
    the heads, an image beside the prompt), and ShapeError for one whose queries are no picture of these proportions.
    """
    check_instance("recording", recording, Recording)
    if len(check_sequence("size", size)) != 2:
        raise ConfigError(f"size must be (height, width); got {len(size)} numbers.")
    height, width = (check_count("size", one, most=LARGEST_SIDE) for one in size)
    total: dict[str, Tensor] = {}
    for name, weights in iterate_columns(recording, check_integer("word", word), check_integer("row", row)):
        total[name] = weights if name not in total else total[name] + weights
    if not total:
        raise ConfigError("no cross attention to the words of a prompt was recorded: record the denoiser, e.g. pipeline.unet.")
    found = torch.zeros(height, width, dtype=torch.float64)
    for name, weights in total.items():
        pictures = arrange_picture(weights, height, width, name)
        found += F.interpolate(pictures[None], size=(height, width), mode="bicubic").clamp(min=0)[0].sum(0).cpu()
    return found


def iterate_columns(recording: Recording, word: int, row: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the name of each cross attention of each step, and the weights (h, q) that its queries give a word."""
    for run in recording.runs:
        check_single_calls(run)
        for call in run.softmax_calls:
            if call.kind == "cross" and MIDDLE not in call.name:
                batch, _, _, words = call.map.shape
                place = check_index("row", row, batch, "the batch"), check_index("word", word, words, "the prompt")
                yield call.name, call.map[place[0], :, :, place[1]].double()


def check_single_calls(run: Run) -> None:
    """Raise ConfigError if a cross attention makes several calls in one forward: some may be of other rows, or of no words."""
    for name, kind, _, index in run.histories:
        if kind == "cross" and MIDDLE not in name and index:
            raise ConfigError(
                f"{name} calls attention several times in one forward, for slices of its heads or for an image beside the "
                "prompt, so that a word cannot be told from its number: record without attention slicing and image prompts."
            )


def arrange_picture(weights: Tensor, height: int, width: int, name: str) -> Tensor:
    """Return the weights (h, q) of queries that are a smaller picture of the same proportions, (h, rows, columns)."""
    n = weights.shape[-1]
    rows = round((n * height / width) ** 0.5)
    if not rows or n % rows or abs(n // rows * height - rows * width) > max(height, width):
        raise ShapeError(f"the {n} queries of {name} are no picture with the proportions of {height} x {width}.")
    return weights.reshape(-1, rows, n // rows)
