"""The part of a model that reads images: the grid of its patches, its special tokens, and its windows."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor, nn

from regard.observe.token_places.media import Media
from regard.observe.token_places.places import EMPTY, PatchGrid

Sizes = tuple[int, int, int]  # batch rows, queries and keys
Sides = tuple[int, int]  # height and width, or rows and columns
CLASS_TOKEN = "class token"  # its name among those of a grid
SPECIAL_TOKENS = {  # parameters before the patches, in the order in which models put them
    "cls_token": CLASS_TOKEN,
    "class_token": CLASS_TOKEN,
    "class_embedding": CLASS_TOKEN,
    "distillation_token": "distillation token",
    "dist_token": "distillation token",
    "register_tokens": "register",
    "reg_token": "register",
}
LATER_TOKENS = ("detection_tokens",)  # parameters behind the patches
MAX_STAGES = 8  # of a model that halves its grid
WINDOWS = 32  # grids cut into windows, cached
WINDOW_SIDES = ("window_size", "block_size")  # attributes of modules that cut their tokens into squares
ONE, NAMED = r"(\w+)", r"\((\w+) (\w+)\)"
CUTS_ROW_BY_ROW = re.compile(rf"{ONE} {ONE} {NAMED} {NAMED} -> \1 (?:\3 \5|\(\3 \5\)) \([\w ]+\)")  # a pattern of einops
SAME_KEYS = 1e-3  # relative to the largest number of all keys: a larger difference is none of rounding


@dataclass(frozen=True, eq=False)
class Tower:
    """The part of a model that reads images: its path, and the grid of its patches."""

    modules: Mapping[str, nn.Module]
    path: str
    rows: int
    columns: int
    cuts: bool = True  # whether the patches are cut out of the image; otherwise they overlap
    knows_registers: bool = True  # whether registers stand before the patches
    padded: Sides | None = None  # rows and columns if the image is padded to whole patches, unless its sides are whole anyway

    def has_layer(self, name: str) -> bool:
        """Return whether a module is inside this part."""
        return not self.path or name.startswith(f"{self.path}.")

    @property
    def sides(self) -> list[Sides]:
        """The rows and columns that the patches may have: what is left over at the edges is cut off, or padded."""
        return [(self.rows, self.columns), *([self.padded] if self.padded is not None else [])]

    @cached_property
    def special_tokens(self) -> tuple[list[str], int]:
        """The names of the tokens before the patches, and the number of those behind them."""
        counts = {}
        for name, module in self.modules.items():
            if name == self.path or self.has_layer(name):
                for own, parameter in module.named_parameters(recurse=False):
                    if own in (*SPECIAL_TOKENS, *LATER_TOKENS):
                        counts[own] = parameter.shape[-2] if parameter.dim() > 1 else 1
        before = [(label, counts[own]) for own, label in SPECIAL_TOKENS.items() if own in counts]
        names = [label if count == 1 else f"{label} {n}" for label, count in before for n in range(count)]
        return names, sum(counts.get(own, 0) for own in LATER_TOKENS)

    def find_grid(self, size: int, stages: Iterable[Sides] = ()) -> PatchGrid | None:
        """Return the grid of a layer with `size` tokens; None unless the patches and the special tokens are exactly these.

        stages: the rows and columns that the layer may have beside those of patches that were cut out of the image.
        """
        grids = {self.fit_grid(size, *sides) for sides in self.sides} - {None} if self.cuts else set()
        grids = grids or {self.fit_grid(size, *sides) for sides in stages if min(sides) > 1} - {None}
        return grids.pop() if len(grids) == 1 else None

    def fit_grid(self, size: int, rows: int, columns: int) -> PatchGrid | None:
        """Return the grid of `size` tokens; None unless rows x columns patches and the special tokens are exactly these."""
        names, behind = self.special_tokens
        is_known = self.knows_registers or "register" not in " ".join(names)
        if is_known and size == rows * columns + len(names) + behind:
            return PatchGrid(rows, columns, len(names), names=tuple(names))
        return PatchGrid(rows, columns, 0) if size == rows * columns else None

    def find_tiles(self, size: int, images: int) -> list[PatchGrid]:
        """Return the grid of each of several images whose tokens, one image behind the other, are the `size` keys of a layer.

        Empty unless their patches and special tokens are exactly these.
        """
        one = self.find_grid(size // images) if images > 1 and size % images == 0 else None
        return [] if one is None else [replace(one, start=(one.start or 0) + size // images * n) for n in range(images)]

    def find_key_grid(self, name: str, q: int, k: int, stages: set[Sides]) -> PatchGrid | None:
        """Return the grid of the k keys of a layer with q queries; None unless they are all tokens, or strides pooled these."""
        if q == k:
            return self.find_grid(k, stages)
        if q < k:
            grid = self.find_grid(k, stages) if stages else None
            return None if grid is None else replace(grid, has_queries=False)
        asking = self.find_grid(q, stages)
        if asking is None or asking.length != q:
            return None
        pooled = {sides for sides in self.list_strided(name, (asking.rows, asking.columns)) if math.prod(sides) == k}
        return PatchGrid(*pooled.pop(), 0, has_queries=False) if len(pooled) == 1 else None

    def list_strided(self, name: str, sides: Sides) -> Iterator[Sides]:
        """Generate the rows and columns that the strides of modules inside a layer make of a grid."""
        for one in list_inside(self.modules, name):
            strided = measure_convolution(one, sides) if isinstance(one, nn.Conv2d) else apply_stride(one, sides)
            if strided is not None and strided != sides:
                yield strided

    def list_stages(self, media: Media, layers: Mapping[tuple[str, str], Sizes]) -> dict[str, set[Sides]]:
        """Return the rows and columns that each layer may have, from the strides of the modules before it, by its path.

        Convolutions count that read the channels which the one before wrote: others stand beside it. Queries that are fewer
        than the keys may be the tokens from there on, if a stride in their layer makes so many of them.
        """
        calls = {name: sizes for (name, _), sizes in layers.items()}
        size, channels = media.size or (0, 0), None
        sides: set[Sides] = set()
        found: dict[str, set[Sides]] = {}
        for name, module in self.modules.items():
            if any(name.startswith(f"{layer}.") for layer in found):
                continue
            if name in calls:
                found[name] = set(sides)
                _, q, k = calls[name]
                if q < k:
                    sides |= {new for old in sides for new in self.list_strided(name, old) if math.prod(new) == q}
            elif (patch := read_patch(module, media.channels)) is not None:
                sides.add((size[0] // patch[0], size[1] // patch[1]))
                channels = getattr(module, "out_channels", None)
            elif (
                isinstance(module, nn.Conv2d) and module.in_channels == (channels or media.channels) and media.size is not None
            ):
                measured = [measure_convolution(module, one) for one in (sides if channels else {media.size})]
                sides, channels = {one for one in measured if one is not None}, module.out_channels
            elif isinstance(module, nn.MaxPool2d | nn.AvgPool2d):  # perhaps beside a convolution
                sides |= {apply_stride(module, one) for one in sides}
        return found

    def attends_over_channels(self, name: str, heads: int, k: Tensor, stages: Iterable[Sides]) -> bool:
        """Return whether the keys (b, g, k, d) of a layer may be the channels of each head, as in XCiT.

        They are then as many as its linear layers read for each head, and as wide as there are tokens.
        """
        size, width = k.shape[2:]
        if size == width:
            lengths = k.float().norm(dim=-1)  # of channels they are 1
            return bool((lengths - lengths.mean()).abs().max() <= SAME_KEYS * lengths.max())
        widths = {one.in_features for one in list_inside(self.modules, name) if isinstance(one, nn.Linear)}
        return heads * size in widths and (heads * width not in widths or self.find_grid(width, stages) is not None)

    def find_windows(self, name: str, k: Tensor, images: int) -> PatchGrid | None:
        """Return the grid of a layer whose batch rows are windows, with its shift; None if it has none.

        k: its keys (b, g, k, d). Those of padding show whether the grid was padded before it was shifted or after.
        """
        window = math.isqrt(k.shape[2])
        if window**2 != k.shape[2] or k.shape[0] % images:
            return None
        found = find_window_module(self.modules, name)
        if found is None or read_window(found) != (window, window):
            return None
        shifts = read_pair(found, "shift_size") or (0, 0)
        grids: list[PatchGrid] = []
        for sides in self.sides:
            stages = ((-(-sides[0] // 2**stage), -(-sides[1] // 2**stage)) for stage in range(MAX_STAGES))
            fitting = (one for one in stages if min(one) >= window and count_windows(one, window) * images == k.shape[0])
            rows, columns = next(fitting, (0, 0))
            if not rows:
                continue
            counts = -(-rows // window), -(-columns // window)
            if shifts[0] != shifts[1] or (1 in counts and max(counts) > 1 and shifts[0]):
                return None
            shift = 0 if max(counts) == 1 else shifts[0]
            grids += (build_windows(rows, columns, window, shift, first) for first in (False, True))
        grids = [*dict.fromkeys(grids)]
        return grids[0] if len(grids) == 1 else select_by_padding(grids, k)


@lru_cache(WINDOWS)
def build_windows(rows: int, columns: int, window: int, shift: int, shifts_first: bool) -> PatchGrid:
    """Return what PatchGrid.from_windows does, once for the layers that have the same windows."""
    return PatchGrid.from_windows(rows, columns, window, shift, shifts_first=shifts_first)


def find_tower(modules: Mapping[str, nn.Module], media: Media, layers: set[str]) -> Tower | None:
    """Return the part of a model that makes patches of its images; None if its first operation on pixels is none that does."""
    cutters = ((name, one, read_patch(one, media.channels)) for name, one in modules.items())
    name, first, patch = next((one for one in cutters if one[2] or isinstance(one[1], nn.Conv2d)), ("", None, None))
    if first is None or media.size is None or (patch is None and getattr(first, "in_channels", None) != media.channels):
        return None
    components = name.split(".") if patch else []  # convolutions may be a part of the first stage
    paths = [".".join(components[:n]) for n in reversed(range(max(len(components), 1)))]
    path = next((one for one in paths if any(layer.startswith(f"{one}.") or not one for layer in layers)), None)
    rows, columns = (side // step for side, step in zip(media.size, patch or (1, 1), strict=True))
    if path is None or not rows * columns:
        return None
    down, across = (-(-side // step) for side, step in zip(media.size, patch or (1, 1), strict=True))
    padded = None if (down, across) == (rows, columns) else (down, across)
    return Tower(modules, path, rows, columns, patch is not None, not hasattr(first, "pattern"), padded)


def read_patch(module: nn.Module, channels: int) -> Sides | None:
    """Return the sides of the patches that a module cuts out of an image, beside each other; None if it is none that does."""
    if not isinstance(module, nn.Conv2d):
        return read_rearranged_patch(module) or read_linear_patch(module, channels)
    is_cut = module.kernel_size == module.stride and max(module.stride) > 1 and module.padding in ("valid", (0, 0))
    return read_pair(module, "stride") if is_cut and module.in_channels == channels else None


def measure_convolution(module: nn.Conv2d, size: Sides) -> Sides | None:
    """Return the height and width of the output of a convolution; None if it does not cover its input evenly."""
    if module.padding == "same":
        return size
    padding = (0, 0) if isinstance(module.padding, str) else module.padding
    shape = zip(size, padding, module.dilation, module.kernel_size, module.stride, strict=True)
    rows, columns = ((n + 2 * one - dilation * (side - 1) - 1) // step + 1 for n, one, dilation, side, step in shape)
    return (rows, columns) if (rows, columns) == apply_stride(module, size) else None


def apply_stride(module: nn.Module, sides: Sides) -> Sides:
    """Return rows and columns divided by the stride of a module, rounded up; as they are if it has none."""
    steps = read_pair(module, "stride") or (1, 1)
    return -(-sides[0] // steps[0]), -(-sides[1] // steps[1])


def read_rearranged_patch(module: nn.Module) -> Sides | None:
    """Return the sides of the patches that a layer of einops makes tokens of, row by row; None for any other module."""
    pattern, sizes = getattr(module, "pattern", None), getattr(module, "axes_lengths", None)
    found = CUTS_ROW_BY_ROW.fullmatch(pattern) if isinstance(pattern, str) else None
    if found is None or not isinstance(sizes, dict):
        return None
    down, across = sizes.get(found[4]), sizes.get(found[6])
    return (down, across) if isinstance(down, int) and isinstance(across, int) else None


def read_linear_patch(module: nn.Module, channels: int) -> Sides | None:
    """Return the sides of the patches, as a module states them, all numbers of which a linear layer of it reads; or None."""
    patch = read_pair(module, "patch_size")
    if patch is None:
        return None
    count = channels * math.prod(patch)
    return patch if any(isinstance(one, nn.Linear) and one.in_features == count for one in module.children()) else None


def list_inside(modules: Mapping[str, nn.Module], path: str) -> Iterator[nn.Module]:
    """Generate a module and those in it."""
    return (one for name, one in modules.items() if name == path or name.startswith(f"{path}."))


def select_by_padding(grids: Iterable[PatchGrid], k: Tensor) -> PatchGrid | None:
    """Return the grid whose padding has the same key everywhere, as zeros have, or else that without padding.

    None unless it is one of them.
    """
    padded = [grid for grid in grids if grid.windows * grid.length > grid.rows * grid.columns]
    fitting = [grid for grid in padded if has_equal_padding(grid, k)] or [grid for grid in grids if grid not in padded]
    return fitting[0] if len(fitting) == 1 else None


def count_windows(sides: Sides, window: int) -> int:
    """Return the number of windows that cover a grid of these rows and columns."""
    return -(-sides[0] // window) * -(-sides[1] // window)


def has_equal_padding(grid: PatchGrid, k: Tensor) -> bool:
    """Return whether the tokens of windows (b, g, k, d) that are no patches have equal keys, up to rounding."""
    order = torch.tensor(grid.order, device=k.device).repeat(len(k) // grid.windows, 1)
    keys = k.float().transpose(1, 2)
    padding = keys[order == EMPTY]  # (n, g, d)
    return bool((padding - padding[:1]).abs().max() <= SAME_KEYS * keys.abs().max())


def find_window_module(modules: Mapping[str, nn.Module], name: str) -> nn.Module | None:
    """Return the module around a layer that cuts its tokens into windows: the innermost with a shift, or else with a window."""
    components = name.split(".")
    around = [modules.get(".".join(components[:n])) for n in range(len(components), 0, -1)]
    windowed = [one for one in around if one is not None and read_window(one)]
    return next((one for one in windowed if read_pair(one, "shift_size")), windowed[0] if windowed else None)


def read_window(module: nn.Module) -> tuple[int, int] | None:
    """Return the sides of the squares into which a module cuts its tokens, in tokens; None if it states none."""
    return next((pair for pair in (read_pair(module, name) for name in WINDOW_SIDES) if pair), None)


def read_pair(module: nn.Module, name: str) -> tuple[int, int] | None:
    """Return an attribute of a module that is a number of patches, or one of each axis; None for anything else."""
    value = getattr(module, name, None)
    pair = tuple(value) if isinstance(value, (list, tuple)) else (value, value)
    return pair if len(pair) == 2 and all(isinstance(one, int) for one in pair) else None
