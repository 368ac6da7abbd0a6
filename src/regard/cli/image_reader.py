"""An image as the input of a model, with or without words, and the recording of what the model does with it."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from regard.cli.image_tiles import (
    TileLayout,
    crop_edges,
    crop_padding,
    draw_coordinates,
    find_layout,
    list_images,
    stitch_places,
)
from regard.cli.progress_bar import show_bar
from regard.observe import Recording, record
from regard.observe.token_places.media import IMAGES
from regard.show.image_input import Pixels

Best = tuple[str, float, Tensor]  # a class or the next word, its probability and its logit


@dataclass(frozen=True, eq=False)
class PreparedImage:
    """The arguments of a model for an image, the images that it makes of it as it sees them, and how they are tiles of it."""

    inputs: dict[str, Any]
    tiles: Sequence[Pixels]
    layout: TileLayout | None = None


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a model said: the words of its text for `recording.tokens`, a sentence, and what is likeliest."""

    sentence: str
    best: Best | None = None
    words: Any = None


class ImageReader(Protocol):
    """A model that reads an image, with or without words."""

    @property
    def name(self) -> str:
        """The name of the model."""

    @property
    def model(self) -> Any:
        """The module that is recorded."""

    def prepare(self, pixels: Pixels) -> PreparedImage:
        """Return an image as the input of the model."""

    def run(self, inputs: dict[str, Any]) -> Outcome:
        """Run the model and return what it says."""


@dataclass(frozen=True, eq=False)
class SeenImage:
    """The recording of a model on an image, the images that its grids of patches are of, and what the model said."""

    recording: Recording
    images: list[Pixels]
    prepared: PreparedImage
    outcome: Outcome
    seconds: float


def measure_layout(tiles: Sequence[Pixels], pixels: Pixels, cut: Callable[[Pixels], Sequence[Pixels]]) -> TileLayout | None:
    """Return how the tiles that `cut` makes of an image lie in it; None if there is one, or if they do not fill its rows."""
    if len(tiles) < 2:
        return None
    found = cut(draw_coordinates(*pixels.shape[:2]))
    return find_layout(found) if len(found) == len(tiles) else None


def record_image(reader: ImageReader, pixels: Pixels, has_graph: bool = False) -> SeenImage:
    """Record a model on an image. With `has_graph` the values are kept, and the logit of what is likeliest has a gradient."""
    prepared = reader.prepare(pixels)
    layers = int(getattr(reader.model.config, "num_hidden_layers", 0) or 0)
    start = time.perf_counter()
    running = record(reader.model, keep="values" if has_graph else None)
    with torch.inference_mode(not has_graph), running as recording, show_bar("running", lambda: len(recording.calls), layers):
        outcome = reader.run(prepared.inputs)
    seconds = time.perf_counter() - start
    recording.model, recording.tokens = reader.name, pair_words(recording, outcome.words)
    given, layout = prepared.inputs.get(IMAGES), prepared.layout
    images = [*prepared.tiles[: given.shape[:-3].numel() if isinstance(given, Tensor) and given.dim() > 3 else 1]]
    if layout is not None:
        tiles = crop_edges(prepared.tiles, recording.places)
        images = crop_padding(list_images(tiles, layout), recording.places, layout)
        recording.places = stitch_places(recording.places, layout)
    return SeenImage(recording, images, prepared, outcome, seconds)


def pair_words(recording: Recording, words: Any) -> Any:
    """Return words as those of queries of cross attention too, if a model has some beside the self-attention to them."""
    has_cross = any(recording.layers("cross", part) for part in (*recording.last.parts, None))
    return {"rows": words, "columns": words} if has_cross and isinstance(words, list) else words
