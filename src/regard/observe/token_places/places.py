"""The places of tokens: which patch of an image, or which time of a recording of sound, each token of an axis stands for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.errors import ConfigError, OutOfRangeError, ShapeError
from regard.mechanism.arguments import check_count, check_flag, check_integer, check_number, check_sequence, describe_value

MAX_SPECIAL_TOKENS = 16  # before the patches, where `start` is not given: a class token and registers are fewer
CROSS = "cross"  # the name in `recording.places` of all cross attention: of its keys, or of its queries without has_keys
HINT = "Set recording.places = regard.PatchGrid(rows, columns, start=number of the first patch)."
EMPTY = -1  # the patch of a token that is none
WHOLE = (0.0, 0.0, 1.0, 1.0)  # top, left, bottom and right of all of an image
MAX_SIDE, MAX_TOKENS = 4096, 2**27  # patches along a side of a grid; tokens of an axis
ADDED = {"has_keys": True, "extent": WHOLE}  # fields that earlier code does not read, as they usually are


@dataclass(frozen=True)
class PatchGrid:
    """Tokens that are the patches of an image, on a grid of rows x columns.

    The patches are the tokens from number `start` on, row by row; by default the last tokens of the axis, after at most 16
    others, such as a class token and registers. `order` states another order: the patch of each token, row * columns + column,
    or -1 for padding; of windows that are batch rows of the map, one such list each. `names` are those of the tokens before the
    patches. Without has_queries the queries of self-attention are other tokens, as where keys are pooled; without has_keys the
    grid is of the queries alone, as of cross attention to the words of a prompt. `extent` is where the grid lies in the image
    that the model read: its top, left, bottom and right as shares of the height and width, by default all of it; a bottom of
    0.9 is of edges that were cut off, one of 1.1 of edges that were padded, and None is not known. Raises ConfigError if these
    do not fit.
    """

    rows: int
    columns: int
    start: int | None = None
    order: tuple[tuple[int, ...], ...] | None = None
    names: tuple[str, ...] = ()
    has_queries: bool = field(default=True, kw_only=True)
    has_keys: bool = field(default=True, kw_only=True)
    extent: tuple[float, float, float, float] | None = field(default=WHOLE, kw_only=True)

    def __post_init__(self) -> None:
        check_sides(self.rows, self.columns)
        if self.start is not None:
            check_count("start", self.start, 0, alternative=", or None for the patches at the end of the axis")
        check_flag("has_queries", self.has_queries)
        if not check_flag("has_keys", self.has_keys) and not self.has_queries:
            raise ConfigError("a grid must be of queries or of keys: leave out has_queries=False or has_keys=False.")
        object.__setattr__(self, "names", tuple(map(str, check_sequence("names", self.names))))
        if self.extent is not None:
            object.__setattr__(self, "extent", check_extent(self.extent))
        if self.order is not None:
            object.__setattr__(self, "order", check_order(self.order, self.rows * self.columns))

    @classmethod
    def from_blocks(cls, rows: int, columns: int, block: int, start: int = 0) -> "PatchGrid":
        """Return the grid of patches that come in blocks of block x block, as those do that a model merges later."""
        check_sides(rows, columns)
        if rows % check_count("block", block) or columns % block:
            raise ConfigError(f"block must divide both sides of the grid, got {block} for {rows} x {columns} patches.")
        patches = torch.arange(rows * columns).view(rows // block, block, columns // block, block)
        return cls(rows, columns, start, (tuple(patches.transpose(1, 2).flatten().tolist()),))

    @classmethod
    def from_windows(cls, rows: int, columns: int, window: int, shift: int = 0, *, shifts_first: bool = False) -> "PatchGrid":
        """Return the grid of patches that attend in windows of window x window, shifted up and left, as in Swin.

        The windows are batch rows of the map, row by row. The grid is padded to whole windows before it is shifted, or
        after, as in timm, with shifts_first.
        """
        check_sides(rows, columns)
        check_count("window", window, most=MAX_SIDE)
        check_count("shift", shift, 0, most=MAX_SIDE)
        check_flag("shifts_first", shifts_first)
        patches = torch.arange(rows * columns).view(rows, columns)
        shifted = patches.roll((-shift, -shift), (0, 1)) if shifts_first else patches
        padded = F.pad(shifted, (0, -columns % window, 0, -rows % window), value=EMPTY)
        padded = padded if shifts_first else padded.roll((-shift, -shift), (0, 1))
        down, across = padded.shape[0] // window, padded.shape[1] // window
        cut = padded.view(down, window, across, window).transpose(1, 2).reshape(down * across, window * window)
        return cls(rows, columns, 0, tuple(map(tuple, cut.tolist())))

    @classmethod
    def from_tiles(cls, tiles: Sequence["PatchGrid"], columns: int) -> "PatchGrid":
        """Return the grid of an image that was cut into tiles with these grids, row by row, `columns` of them in a row.

        The tiles stand on one axis, such as that of a text; tokens between them are no patches.
        """
        grids = check_tiles(tiles, check_count("columns", columns, most=MAX_SIDE))
        down, across = grids[0].rows, grids[0].columns
        rows, whole = len(grids) // columns * down, columns * across
        first = min(one.start or 0 for one in grids)
        order = [EMPTY] * (max((one.start or 0) + one.length for one in grids) - first)
        for number, one in enumerate(grids):
            above, left = number // columns * down, number % columns * across
            for token, patch in enumerate(one.locate_tokens((one.start or 0) + one.length)[0, one.start :].tolist()):
                if patch != EMPTY:
                    row, column = divmod(patch, across)
                    order[(one.start or 0) - first + token] = (above + row) * whole + left + column
        return cls(rows, whole, first, (tuple(order),))

    @property
    def windows(self) -> int:
        """The number of batch rows of the map that hold one image."""
        return 1 if self.order is None else len(self.order)

    @property
    def length(self) -> int:
        """The number of tokens that the patches and their padding take in a window."""
        return self.rows * self.columns if self.order is None else len(self.order[0])

    def find_start(self, size: int) -> int:
        """Return the number of the first patch on an axis of `size` tokens. Raises ShapeError if the patches do not fit."""
        check_count("size", size, most=MAX_TOKENS)
        start = size - self.length if self.start is None else self.start
        if start < 0 or start + self.length > size or (self.start is None and start > MAX_SPECIAL_TOKENS):
            taken = f"{self.length:,} tokens" + (f" from token {self.start:,} on" if self.start is not None else "")
            raise ShapeError(f"the {self.rows} x {self.columns} patches take {taken}, but the axis has {size:,} tokens. {HINT}")
        return start

    def locate_tokens(self, size: int) -> Tensor:
        """Return the patch of each token of an axis of `size` tokens, (windows, size); -1 for a token that is no patch."""
        start = self.find_start(size)
        found = torch.full((self.windows, size), EMPTY)
        order = torch.arange(self.length)[None] if self.order is None else torch.tensor(self.order)
        found[:, start : start + self.length] = order
        return found

    def find_token(self, row: int, column: int, size: int) -> tuple[int, int]:
        """Return the window and the token of a patch on an axis of `size` tokens. Raises OutOfRangeError if there is none."""
        for name, given, count in (("row", row, self.rows), ("column", column, self.columns)):
            if isinstance(given, bool) or not isinstance(given, int) or not -count <= given < count:
                raise OutOfRangeError(f"a patch must have a {name} from 0 to {count - 1}, got {describe_value(given)}.")
        patch = row % self.rows * self.columns + column % self.columns
        window, token = (self.locate_tokens(size) == patch).nonzero()[0].tolist()
        return window, token

    def name_tokens(self, size: int) -> list[str]:
        """Return a name for each token of an axis: of patches their row and column, of others `names` or their numbers."""
        self.find_start(size)
        named = [f"token {n}" for n in range(size)]
        named[: len(self.names)] = self.names[:size]
        if self.windows == 1:
            for n, patch in enumerate(self.locate_tokens(size)[0].tolist()):
                if patch != EMPTY:
                    named[n] = "patch {},{}".format(*divmod(patch, self.columns))
        return named


def check_sides(rows: int, columns: int) -> None:
    """Raise ConfigError unless both sides of a grid are from 1 to MAX_SIDE."""
    for name, side in (("rows", rows), ("columns", columns)):
        check_count(name, side, most=MAX_SIDE)


def check_extent(extent: Any) -> tuple[float, ...]:
    """Return an extent as four numbers. Raises ConfigError unless its bottom and right are beyond its top and left."""
    found = tuple(round(check_number("a number of extent", one), 6) for one in check_sequence("extent", extent))
    if len(found) != 4 or not (found[0] < found[2] and found[1] < found[3]) or max(map(abs, found)) > MAX_SIDE:
        raise ConfigError(f"extent must be top, left, bottom and right as shares of an image, got {describe_value(extent)}.")
    return found


def check_tiles(tiles: Any, columns: int) -> list[PatchGrid]:
    """Return the grids of tiles. Raises ConfigError unless they are of one size, have a start, and fill whole rows."""
    found = check_sequence("tiles", tiles)
    fits = bool(found) and len(found) % columns == 0 and all(isinstance(one, PatchGrid) for one in found)
    is_one_size = fits and len({(one.rows, one.columns) for one in found}) == 1
    if is_one_size and all(one.start is not None and one.windows == 1 for one in found):
        return list(found)
    raise ConfigError(
        f"tiles must be grids of one size on one axis, each with its start, that fill rows of {columns}; got {len(found)}: "
        f"{', '.join(map(describe_value, found[:3]))}."
    )


def check_order(order: Any, patches: int) -> tuple[tuple[int, ...], ...]:
    """Return an order as one tuple for each window. Raises ConfigError if it does not name every patch exactly once."""
    windows = check_sequence("order", order)
    if all(isinstance(one, int) for one in windows):
        windows = [windows]
    found = tuple(map(check_patches, windows))
    named = sorted(chain.from_iterable(found))
    del named[: named.count(EMPTY)]  # the smallest of those that are allowed
    if named != [*range(patches)] or len({*map(len, found)}) != 1:
        raise ConfigError(
            f"order must name each of the {patches} patches once, in windows of one length; got {len(named)} patches in "
            f"{len(found)} windows."
        )
    return found


def check_patches(patches: Any) -> tuple[int, ...]:
    """Return the patches of a window. Raises ConfigError if they are no sequence of integers."""
    found = check_sequence("order", patches)
    if {*map(type, found)} == {int}:  # quick, for the many of large images
        return tuple(found)
    return tuple(check_integer("a patch in order", patch) for patch in found)


@dataclass(frozen=True)
class AudioFrames:
    """Tokens that are frames of sound: token n stands for the time from n * seconds on."""

    seconds: float

    def __post_init__(self) -> None:
        if not check_number("seconds", self.seconds) > 0:
            raise ConfigError(f"seconds must be above 0, the time from one frame to the next; got {self.seconds}.")

    def locate_tokens(self, size: int) -> Tensor:
        """Return the time at which each of `size` tokens starts, (size,), in seconds."""
        return torch.arange(check_count("size", size, most=MAX_TOKENS), dtype=torch.float64) * self.seconds


Place = PatchGrid | AudioFrames
CLASSES: dict[str, type[Place]] = {"PatchGrid": PatchGrid, "AudioFrames": AudioFrames}
Places = Place | Sequence[PatchGrid] | Mapping[str, Place | Sequence[PatchGrid]]


def check_places(places: Any) -> Any:
    """Return places as they are: None, one, a list of grids for several images, or a mapping from paths of modules to these.

    Raises ConfigError for anything else.
    """
    values = list(places.values()) if isinstance(places, Mapping) else [places]
    named = not isinstance(places, Mapping) or all(isinstance(name, str) for name in places)
    if places is None or (named and all(is_place(one) for one in values)):
        return places
    raise ConfigError(
        "places must be a regard.PatchGrid, a regard.AudioFrames, a list of grids for several images, or a mapping from "
        f"modules to these, like {{'vision_model': regard.PatchGrid(14, 14)}}; got {describe_value(places)}."
    )


def is_place(value: Any) -> bool:
    """Return whether a value is a place, or a list of grids for several images."""
    several = isinstance(value, (list, tuple)) and bool(value) and all(isinstance(one, PatchGrid) for one in value)
    return several or isinstance(value, (PatchGrid, AudioFrames))


def list_places(places: Places | None) -> list[Place]:
    """Return every place of a recording, of all modules and images."""
    if isinstance(places, Mapping):
        return [place for one in places.values() for place in list_places(one)]
    if isinstance(places, (list, tuple)):
        return list(places)
    return [] if places is None else [places]  # type: ignore[list-item]


def select_places(places: Places | None, kind: str, name: str) -> list[Place]:
    """Return the places of a layer, by its kind and its module's path: several for several images.

    Of a mapping, the longest name counts that is a part of the module's path; for cross attention its whole path, or "cross".
    """
    if isinstance(places, Mapping):
        fitting = [one for one in places if is_name_of(one, kind, name)]
        found: Any = places[max(fitting, key=lambda one: (one == name, len(one)))] if fitting else None
    else:
        found = places
    return [] if found is None else list(found) if isinstance(found, (list, tuple)) else [found]


def is_name_of(one: str, kind: str, name: str) -> bool:
    """Return whether a name in a mapping of places names a module of a kind."""
    if kind == CROSS:
        return one in (name, CROSS)
    return one in ("", name) or (one != CROSS and f".{one}." in f".{name}.")


def require_extent(grid: PatchGrid) -> tuple[float, float, float, float]:
    """Return where a grid lies in its image. Raises ConfigError if that is not known."""
    if grid.extent is None:
        raise ConfigError(
            f"where the {grid.rows} x {grid.columns} patches lie in the image is not known: its sides are no multiples. "
            "Set recording.places = regard.PatchGrid(rows, columns, extent=(top, left, bottom, right)), in shares of the image."
        )
    return grid.extent


def describe_wordless_tokens(places: Sequence[Place], size: int) -> str | None:
    """Return what all tokens of an axis are where they have no text, patches or frames of sound; None where they may have."""
    if any(isinstance(one, AudioFrames) for one in places):
        return "frames of sound"
    grids = [one for one in places if isinstance(one, PatchGrid)]
    starts = [one.find_start(size) for one in grids]
    is_whole = bool(grids) and starts[-1] + grids[-1].length == size
    return "patches of an image" if is_whole and starts[0] <= len(grids[0].names) else None


def serialize_places(places: Places | None) -> Any:
    """Return places as plain values."""
    if isinstance(places, Mapping):
        return {"modules": {name: serialize_places(one) for name, one in places.items()}}
    if isinstance(places, (list, tuple)):
        return [serialize_places(one) for one in places]
    if places is None:
        return None
    fields = {name: value for name, value in vars(places).items() if name not in ADDED or value != ADDED[name]}
    return {"class": type(places).__name__, **fields}


def deserialize_places(found: Any) -> Any:
    """Build places from plain values; raises ValueError, TypeError, LookupError or ConfigError if they are damaged."""
    if isinstance(found, list):
        return [deserialize_places(one) for one in found]
    if found is None:
        return None
    if "modules" in found:
        return {str(name): deserialize_places(one) for name, one in found["modules"].items()}
    return CLASSES[found["class"]](**{name: value for name, value in found.items() if name != "class"})
