"""A figure of the pixels that words of a prompt were drawn in: heat maps of a diffusion model over its image."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from regard.errors import ConfigError
from regard.mechanism.arguments import check_sequence
from regard.observe import Recording
from regard.observe.token_places.diffusion import list_prompt_words, word_heat_map
from regard.show.color_scale import LinearScale
from regard.show.figure import Picture
from regard.show.image_input import load_image
from regard.show.image_overlay import Panel, draw_panels

MAX_SIDE = 512  # pixels of a heat map
WHAT = "weight, added up over steps, layers and heads"


def draw_word_heat_map(
    recording: Recording, image: Any, words: int | Sequence[int], *, row: int = -1, title: str | None = None
) -> Picture:
    """Draw an image that a diffusion model made, and beside it the DAAM heat map of each word over it, on one scale.

    The image is a file, a PIL image, an array or a tensor. `words` and `row` are those of regard.word_heat_map: positions among
    the tokens of the prompt, which are named by recording.tokens where it has them, and the sequence of the batch.
    Raises ConfigError and ShapeError as regard.word_heat_map does, or without words.
    """
    pixels = load_image(image)
    chosen = [words] if isinstance(words, int) else list(check_sequence("words", words))
    if not chosen:
        raise ConfigError("words must be positions among the tokens of the prompt, got none.")
    shrink = max(1.0, max(pixels.shape[:2]) / MAX_SIDE)
    size = round(pixels.shape[0] / shrink), round(pixels.shape[1] / shrink)
    panels = []
    for word in chosen:
        heat = word_heat_map(recording, word, size, row).numpy()
        names = list_prompt_words(recording, row)
        panels.append(Panel(heat, f"“{names[word].strip()}”, word {word}" if names else f"word {word}"))
    return draw_panels(pixels, Panel(np.zeros((0, 0)), title or "the image", WHAT), panels, LinearScale(low=0))
