"""The part of a model that reads images: the grid of its patches, its special tokens, and its windows."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import nn

from regard.observe.media import Media
from regard.observe.places import PatchGrid

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

    def find_windows(self, name: str, sizes: Sizes, images: int) -> PatchGrid | None:
        """Return the grid of a layer whose batch rows are windows, with its shift; None if it has none."""
        window = math.isqrt(sizes[2])
        if window**2 != sizes[2] or sizes[0] % images:
            return None
        found = find_window_module(self.modules, name)
        if found is None or read_pair(found, "window_size") != (window, window):
            return None
        for stage in range(MAX_STAGES):
            rows, columns = -(-self.rows // 2**stage), -(-self.columns // 2**stage)
            counts = -(-rows // window), -(-columns // window)
            if min(rows, columns) >= window and counts[0] * counts[1] * images == sizes[0]:
                shifts = read_pair(found, "shift_size") or (0, 0)
                if shifts[0] != shifts[1] or (1 in counts and max(counts) > 1 and shifts[0]):
                    return None
                return PatchGrid.from_windows(rows, columns, window, 0 if max(counts) == 1 else shifts[0])
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
