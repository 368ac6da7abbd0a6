"""The images of a recording on the page: as addresses that hold them, and the grids of patches of each layer."""

import base64
import io
import json
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

from torch import Tensor

from regard.errors import ConfigError, ShapeError
from regard.map.codes import encode_weights
from regard.observe import Recording
from regard.observe.recorded_runs.token_mixers import SELF, list_token_mixers
from regard.observe.rollout import find_moved_layer, iterate_rollouts
from regard.observe.token_places.places import AudioFrames, PatchGrid, Place
from regard.show.image_input import Pixels

MAX_SIDE = 1024  # pixels of an image on the page
LOSSLESS_SIDE = 512  # up to this side an image is stored without loss
JPEG_QUALITY = 90
CODE_BYTES, MAX_ROLLOUT_BYTES = 2, 8 * 2**20  # of a weight; of the rollouts in a file, before compression
Grid = dict[str, Any]
Shape = tuple[int, int, int, int]  # (b, h, q, k)


def encode_image(pixels: Pixels) -> str:
    """Return an image as a data: address, at most 1,024 pixels wide and high. Raises ConfigError if Pillow is not installed."""
    try:
        pillow: Any = import_module("PIL.Image")
    except ImportError:
        raise ConfigError("a page with an image needs Pillow: pip install pillow.") from None
    image, stored = pillow.fromarray(pixels), io.BytesIO()
    if max(image.size) > MAX_SIDE:
        image.thumbnail((MAX_SIDE, MAX_SIDE))
    kind = "png" if max(image.size) <= LOSSLESS_SIDE else "jpeg"
    image.save(stored, kind, **({"quality": JPEG_QUALITY} if kind == "jpeg" else {"optimize": True}))
    return f"data:image/{kind};base64,{base64.b64encode(stored.getvalue()).decode()}"


def iterate_rollout_codes(recording: Recording, part: str | None, shapes: Sequence[Shape]) -> Iterator[tuple[int, int, Tensor]]:
    """Yield the layer, the batch row and the codes (t, t) of the rollout up to each layer of self attention.

    Nothing where its tokens differ from layer to layer, as windows do, or where the codes would take more than 8 MiB.
    """
    b, _, q, k = shapes[0]
    if not can_roll_out(recording, part, shapes) or CODE_BYTES * len(shapes) * b * q * k > MAX_ROLLOUT_BYTES:
        return
    for (kind, layer), found in zip(
        list_token_mixers(recording.last, None, part), iterate_rollouts(recording, part), strict=True
    ):
        for row in range(b if kind == SELF else 0):
            yield layer, row, encode_weights(found[row].float())


def can_roll_out(recording: Recording, part: str | None, shapes: Sequence[Shape]) -> bool:
    """Return whether the layers of a part have the same tokens, in the same places, and ran in an order that is known."""
    if len(set(shapes)) > 1 or shapes[0][2] != shapes[0][3]:
        return False
    try:
        mixers = list_token_mixers(recording.last, None, part)
    except ConfigError:
        return False
    squares = [recording.map(number, kind=kind, part=part).shape[2:] for kind, number in mixers if kind != SELF]
    if any(one != shapes[0][2:] for one in squares):
        return False
    return find_moved_layer(recording, range(len(shapes)), part) is None


def name_special_tokens(grid: PatchGrid, start: int, keys: int) -> list[str]:
    """Return the names of the tokens before the patches of a grid, as far as they are known."""
    return [*grid.names] or (["class token"] if start == 1 and keys == grid.length + 1 else [])


def name_places(places: Sequence[Place], size: int) -> list[str]:
    """Return the name of each token of an axis that is one image or sound, such as "patch 0,3"; empty for another axis.

    Their spaces do not break, so that they are not marked as those of a text.
    """
    if len(places) != 1:
        return []
    (place,) = places
    if isinstance(place, AudioFrames):
        return [f"{seconds:.2f}\u00a0s" for seconds in place.locate_tokens(size).tolist()]
    try:
        start = place.find_start(size)
    except ShapeError:  # places of other layers, set by hand for all
        return []
    names = place.name_tokens(size) if place.windows == 1 else []
    if names:
        special = name_special_tokens(place, start, size)
        names[: len(special)] = special
    return [name.replace(" ", "\u00a0") for name in names]


class GridTable:
    """The grids of patches of all layers of a recording, each of them once."""

    def __init__(self) -> None:
        self.grids: list[Grid] = []
        self.numbers: dict[str, int] = {}

    def add_layer(self, recording: Recording, layer: int, kind: str, part: str | None, keys: int) -> list[int]:
        """Return the numbers of the grids of a layer's keys, one for each image; empty where no place in it is known."""
        found = []
        for grid in recording.axis_places(layer, kind, part)[1]:
            if isinstance(grid, PatchGrid) and grid.extent is not None:
                try:
                    start = grid.find_start(keys)
                except ShapeError:  # places of other layers, set by hand for all
                    continue
                names = name_special_tokens(grid, start, keys)
                found.append(self.add_grid({**vars(grid), "start": start, "names": names}))
        return found

    def add_grid(self, grid: Grid) -> int:
        """Return the number of a grid."""
        written = json.dumps(grid)
        if written not in self.numbers:
            self.numbers[written] = len(self.grids)
            self.grids.append(grid)
        return self.numbers[written]
