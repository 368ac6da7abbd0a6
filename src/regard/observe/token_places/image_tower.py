"""The part of a model that reads images: the grid of its patches, and its special tokens."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor, nn

from regard.observe.token_places.media import Media
from regard.observe.token_places.places import WHOLE, PatchGrid

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
    knows_registers: bool = True  # whether registers stand before the patches
    extent: tuple[float, float, float, float] = WHOLE  # of the patches in the image, of which convolutions cut off the rest

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
        is_known = self.knows_registers or "register" not in " ".join(names)
        if is_known and size == self.rows * self.columns + len(names) + behind:
            return PatchGrid(self.rows, self.columns, len(names), names=tuple(names))
        return PatchGrid(self.rows, self.columns, 0) if size == self.rows * self.columns else None

    def find_tiles(self, size: int, images: int) -> list[PatchGrid]:
        """Return the grid of each of several images whose tokens, one image behind the other, are the `size` keys of a layer.

        Empty unless their patches and special tokens are exactly these.
        """
        one = self.find_grid(size // images) if images > 1 and size % images == 0 else None
        return [] if one is None else [replace(one, start=(one.start or 0) + size // images * n) for n in range(images)]

    def attends_over_channels(self, name: str, heads: int, k: Tensor) -> bool:
        """Return whether the keys (b, g, k, d) of a layer may be the channels of each head, as in XCiT.

        They are then as many as its linear layers read for each head, and as wide as there are tokens.
        """
        size, width = k.shape[2:]
        if size == width:
            lengths = k.float().norm(dim=-1)  # of channels they are 1
            return bool((lengths - lengths.mean()).abs().max() <= SAME_KEYS * lengths.max())
        inside = (one for path, one in self.modules.items() if f"{path}.".startswith(f"{name}."))
        widths = {one.in_features for one in inside if isinstance(one, nn.Linear)}
        return heads * size in widths and (heads * width not in widths or self.find_grid(width) is not None)


def find_tower(modules: Mapping[str, nn.Module], media: Media, layers: set[str]) -> Tower | None:
    """Return the part of a model that cuts its images into patches; None if its first operation on pixels does not."""
    cutters = ((name, one, read_patch(one, media.channels)) for name, one in modules.items())
    name, first, patch = next((one for one in cutters if one[2] or isinstance(one[1], nn.Conv2d)), ("", None, None))
    if patch is None or media.size is None:
        return None
    components = name.split(".")
    paths = [".".join(components[:n]) for n in reversed(range(len(components)))]
    path = next((one for one in paths if any(layer.startswith(f"{one}.") or not one for layer in layers)), None)
    rows, columns = media.size[0] // patch[0], media.size[1] // patch[1]
    if path is None or not rows * columns:
        return None
    bottom, right = rows * patch[0] / media.size[0], columns * patch[1] / media.size[1]
    return Tower(modules, path, rows, columns, isinstance(first, nn.Conv2d), (0.0, 0.0, bottom, right))


def read_patch(module: nn.Module, channels: int) -> Sides | None:
    """Return the sides of the patches that a convolution or a layer of einops cuts out beside each other; None for others."""
    pattern, sizes = str(getattr(module, "pattern", "")), getattr(module, "axes_lengths", None)
    if isinstance(module, nn.Conv2d):
        is_cut = module.kernel_size == module.stride and max(module.stride) > 1 and module.padding in ("valid", (0, 0))
        return (module.stride[0], module.stride[1]) if is_cut and module.in_channels == channels else None
    found = CUTS_ROW_BY_ROW.fullmatch(pattern)
    if found is None or not isinstance(sizes, dict):
        return None
    down, across = sizes.get(found[4]), sizes.get(found[6])
    return (down, across) if isinstance(down, int) and isinstance(across, int) else None
