"""Patterns of einops's layer Rearrange: the names of axes in each dimension, and their sizes."""

import math
import re
from collections.abc import Sequence


def parse_axes(side: str, rank: int) -> list[list[str]]:
    """Return the names of the axes of each dimension on one side of a pattern of einops; 1 is no axis.

    An ellipsis stands for a number of dimensions.
    """
    groups = [(found[1] or found[0]).split() for found in re.finditer(r"\(([^)]*)\)|\S+", side)]
    others = [[f"...{n}"] for n in range(rank)]
    expanded = [one for group in groups for one in (others if group == ["..."] else [group])]
    return [[name for name in group if name not in ("1", "()")] for group in expanded]


def find_axis_sizes(groups: list[list[str]], shape: Sequence[int], lengths: dict[str, int]) -> dict[str, int] | None:
    """Return the sizes of axes whose groups make up a shape, some with lengths that are known; None for other patterns."""
    if len(groups) != len(shape) or any(len({*group} - lengths.keys()) > 1 for group in groups):
        return None
    sizes = dict(lengths)
    for group, size in zip(groups, shape, strict=True):
        known = math.prod(lengths[name] for name in group if name in lengths)
        sizes |= {name: size // max(known, 1) for name in group if name not in lengths}
    return sizes
