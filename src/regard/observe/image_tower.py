"""The part of a model that reads images: the grid of its patches, its special tokens, and its windows."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from regard.observe.media import Media
from regard.observe.places import EMPTY, PatchGrid

Sizes = tuple[int, int, int]  # batch rows, queries and keys
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
SAME_KEYS = 1e-3  # relative to the largest number of all keys: a larger difference is none of rounding


@dataclass(frozen=True, eq=False)
class Tower:
    """The part of a model that reads images: its path, and the grid of its patches."""

    modules: Mapping[str, nn.Module]
    path: str
    rows: int
    columns: int

    def has_layer(self, name: str) -> bool:
        """Return whether a module is inside this part."""
        return not self.path or name.startswith(f"{self.path}.")

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

    def find_grid(self, size: int) -> PatchGrid | None:
        """Return the grid of a layer with `size` tokens; None unless the patches and the special tokens are exactly these."""
        names, behind = self.special_tokens
        if size == self.rows * self.columns + len(names) + behind:
            return PatchGrid(self.rows, self.columns, len(names), names=tuple(names))
        return PatchGrid(self.rows, self.columns, 0) if size == self.rows * self.columns else None

    def find_windows(self, name: str, k: Tensor, images: int) -> PatchGrid | None:
        """Return the grid of a layer whose batch rows are windows, with its shift; None if it has none.

        k: its keys (b, g, k, d). Those of padding show whether the grid was padded before it was shifted or after.
        """
        window = math.isqrt(k.shape[2])
        if window**2 != k.shape[2] or k.shape[0] % images:
            return None
        found = find_window_module(self.modules, name)
        if found is None or read_pair(found, "window_size") != (window, window):
            return None
        for stage in range(MAX_STAGES):
            rows, columns = -(-self.rows // 2**stage), -(-self.columns // 2**stage)
            counts = -(-rows // window), -(-columns // window)
            if min(rows, columns) >= window and counts[0] * counts[1] * images == k.shape[0]:
                shifts = read_pair(found, "shift_size") or (0, 0)
                if shifts[0] != shifts[1] or (1 in counts and max(counts) > 1 and shifts[0]):
                    return None
                shift = 0 if max(counts) == 1 else shifts[0]
                grid = PatchGrid.from_windows(rows, columns, window, shift)
                other = PatchGrid.from_windows(rows, columns, window, shift, shifts_first=True)
                return grid if grid == other else select_by_padding((grid, other), k)
        return None


def find_tower(modules: Mapping[str, nn.Module], media: Media, layers: set[str]) -> Tower | None:
    """Return the part of a model whose first convolution cuts its images into patches; None if there is none."""
    name, first = next(((name, one) for name, one in modules.items() if isinstance(one, nn.Conv2d)), ("", None))
    if first is None or media.size is None or first.kernel_size != first.stride or max(first.stride) < 2:
        return None
    if first.in_channels != media.channels or first.padding not in ("valid", (0, 0)):
        return None
    components = name.split(".")
    paths = [".".join(components[:n]) for n in reversed(range(len(components)))]
    path = next((one for one in paths if any(layer.startswith(f"{one}.") or not one for layer in layers)), None)
    rows, columns = (side // step for side, step in zip(media.size, first.stride, strict=True))
    return None if path is None or not rows * columns else Tower(modules, path, rows, columns)


def select_by_padding(grids: Iterable[PatchGrid], k: Tensor) -> PatchGrid | None:
    """Return the grid whose padding has the same key everywhere, as zeros have; None unless it is one of them."""
    fitting = [grid for grid in grids if has_equal_padding(grid, k)]
    return fitting[0] if len(fitting) == 1 else None


def has_equal_padding(grid: PatchGrid, k: Tensor) -> bool:
    """Return whether the tokens of windows (b, g, k, d) that are no patches have equal keys, up to rounding."""
    order = torch.tensor(grid.order, device=k.device).repeat(len(k) // grid.windows, 1)
    keys = k.float().transpose(1, 2)
    padding = keys[order == EMPTY]  # (n, g, d)
    return padding.numel() > 0 and bool((padding - padding[:1]).abs().max() <= SAME_KEYS * keys.abs().max())


def find_window_module(modules: Mapping[str, nn.Module], name: str) -> nn.Module | None:
    """Return the module around a layer that cuts its tokens into windows: the innermost with a shift, or else with a window."""
    components = name.split(".")
    around = [modules.get(".".join(components[:n])) for n in range(len(components), 0, -1)]
    windowed = [one for one in around if one is not None and read_pair(one, "window_size")]
    return next((one for one in windowed if read_pair(one, "shift_size")), windowed[0] if windowed else None)


def read_pair(module: nn.Module, name: str) -> tuple[int, int] | None:
    """Return an attribute of a module that is a number of patches, or one of each axis; None for anything else."""
    value = getattr(module, name, None)
    pair = tuple(value) if isinstance(value, (list, tuple)) else (value, value)
    return pair if len(pair) == 2 and all(isinstance(one, int) for one in pair) else None
