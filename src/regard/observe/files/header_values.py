"""Validation of header values read from a file: each function returns the value or raises TypeError or ValueError."""

import math
from typing import Any

import torch
from torch import Tensor

from regard.map.distance_products import DistanceProducts, DistanceTerm
from regard.map.grid_bias import Grid, GridBias
from regard.map.grouped_bias import GroupedBias
from regard.map.relative_bias import RelativeBias

LARGEST = 2**30  # numbers of an empty tensor, its batch or position axis of 0 counted as 1
MOST_HEADS = 2**16
REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def require_list(x: Any, length: int | None = None) -> list[Any]:
    """Return x, which must be a list, of this length if one is given."""
    if not isinstance(x, list) or length not in (None, len(x)):
        raise TypeError(f"expected a list{'' if length is None else f' of {length}'}, got {type(x).__name__}")
    return x


def require_text(x: Any) -> str:
    """Return x, which must be a string."""
    if not isinstance(x, str):
        raise TypeError(f"expected a text, got {type(x).__name__}")
    return x


def require_bool(x: Any) -> bool:
    """Return x, which must be a bool."""
    if not isinstance(x, bool):
        raise TypeError(f"expected true or false, got {x!r:.40}")
    return x


def require_integer(x: Any) -> int:
    """Return x, which must be an integer that torch can hold."""
    if not isinstance(x, int) or isinstance(x, bool) or abs(x) > 2**62:
        raise TypeError(f"expected a whole number, got {x!r:.40}")
    return x


def require_offset(x: Any) -> int | Tensor:
    """Return x, which must be the position of the first query: an integer, or a list of one for each batch row."""
    return torch.tensor([require_integer(one) for one in x]) if isinstance(x, list) else require_integer(x)


def require_count(x: Any) -> int:
    """Return x, which must be an integer from 0 to 2**31 - 1: an index or a count."""
    if not 0 <= require_integer(x) < 2**31:
        raise ValueError(f"expected a number from 0 to {2**31 - 1}, got {x}")
    return int(x)


def require_finite(x: Any) -> float:
    """Return x, which must be a finite number, as a float."""
    if not isinstance(x, int | float) or isinstance(x, bool) or not math.isfinite(x):
        raise TypeError(f"expected a finite number, got {x!r:.40}")
    return float(x)


def require_four_axes(x: Tensor) -> Tensor:
    """Return x, which must have four axes (b, h, t, d), and no more heads and numbers than a tensor in memory could."""
    if x.dim() != 4:
        raise ValueError(f"expected four axes, got {tuple(x.shape)}")
    b, h, t, d = x.shape
    if not (0 < h <= MOST_HEADS and d and max(b, 1) * h * max(t, 1) * d <= max(x.numel(), LARGEST)):
        raise ValueError(f"expected batch rows, heads, positions and numbers, got {(b, h, t, d)}")
    return x


def require_relative_bias(x: Any, tensors: dict[str, Tensor]) -> RelativeBias:
    """Return the bias of x, the name of its diagonals, (b, h, q + k - 1), and its number of queries."""
    name, queries = require_list(x, 2)
    diagonals = tensors[name]
    if diagonals.dim() != 3 or not 0 < require_count(queries) <= diagonals.shape[2]:
        raise ValueError(f"diagonals {tuple(diagonals.shape)} are no bias of {queries} queries")
    return RelativeBias(diagonals, queries)


def require_bias(x: Any, tensors: dict[str, Tensor]) -> Tensor:
    """Return the bias of x: the name of a tensor, or those of diagonals, products, groups or a grid, with what they need."""
    if isinstance(x, dict):
        if "grid" in x:
            return require_grid_bias(x, tensors)
        return require_grouped_bias(x, tensors) if "groups" in x else require_distance_products(x, tensors)
    return require_relative_bias(x, tensors) if isinstance(x, list) else tensors[x]


def require_grouped_bias(x: dict[str, Any], tensors: dict[str, Tensor]) -> Tensor:
    """Return the bias of x: the names of the numbers of groups, and of the groups of each key."""
    shape = tuple(require_count(size) for size in require_list(x["shape"], 4))
    numbers, groups = tensors[x["numbers"]], tensors[x["groups"]]
    if (
        numbers.dim() != 4
        or numbers.dtype not in REAL
        or groups.dim() != 2
        or groups.dtype != torch.int64
        or not groups.numel()
    ):
        raise ValueError(f"numbers {tuple(numbers.shape)} and groups {tuple(groups.shape)} are no bias")
    if int(groups.min()) < 0 or int(groups.max()) >= numbers.shape[3]:
        raise ValueError(f"groups {tuple(groups.shape)} do not fit numbers {tuple(numbers.shape)}")
    sizes = zip(numbers.shape[:2], shape[:2], strict=True)
    if any(m not in (1, n) for m, n in sizes) or (numbers.shape[2], groups.shape[1]) != shape[2:]:
        raise ValueError(f"numbers {tuple(numbers.shape)} and groups {tuple(groups.shape)} do not fit {shape}")
    return GroupedBias(numbers, groups).expand(shape)


def require_grid_bias(x: dict[str, Any], tensors: dict[str, Tensor]) -> Tensor:
    """Return the bias of x: the name of the numbers of a grid, the grid, and the first query and key of its span."""
    shape = tuple(require_count(size) for size in require_list(x["shape"], 4))
    numbers, grid = tensors[x["numbers"]], Grid(*map(require_count, require_list(x["grid"], 4)))
    if grid.first > 1 or min(grid.rows, grid.columns, grid.step) < 1:
        raise ValueError(f"{grid} is no grid")
    starts = map(require_count, require_list(x["starts"], 2))
    queries, keys = (range(start, start + n) for start, n in zip(starts, shape[2:], strict=True))
    if numbers.dim() != 3 or numbers.dtype not in REAL or numbers.shape[2] != grid.count:
        raise ValueError(f"numbers {tuple(numbers.shape)} do not fit {grid}")
    is_expanded = all(m in (1, n) for m, n in zip(numbers.shape[:2], shape[:2], strict=True))
    if not is_expanded or queries.stop > grid.queries or keys.stop > grid.keys:
        raise ValueError(f"numbers {tuple(numbers.shape)} of {grid} do not fit {shape}")
    return GridBias(numbers, grid, queries, keys).expand(shape)


def require_distance_products(x: dict[str, Any], tensors: dict[str, Tensor]) -> DistanceProducts:
    """Return the bias of x: the names of the vectors, tables and indices of its terms, and of what is added to them."""
    shape = tuple(require_count(size) for size in require_list(x["shape"], 4))
    terms = []
    for found in require_list(x["terms"]):
        *names, is_of_keys = require_list(found, 4)
        vectors, table, index = (tensors[name] for name in names)
        if index.dtype != torch.int64 or index.dim() != 1 or not vectors.dim() == table.dim() == 4:
            raise ValueError(f"vectors {tuple(vectors.shape)} and a table {tuple(table.shape)} are no term")
        if any(one.dtype not in REAL for one in (vectors, table)) or vectors.shape[3] != table.shape[3]:
            raise ValueError(f"vectors {tuple(vectors.shape)} do not fit a table {tuple(table.shape)}")
        own, other = (shape[3], shape[2]) if require_bool(is_of_keys) else (shape[2], shape[3])
        has_rows = len(index) > 0 and int(index.min()) >= 0 and int(index.max()) < table.shape[2]
        if vectors.shape[2] != own or len(index) != own + other - 1 or not has_rows:
            raise ValueError(f"an index of {len(index)} distances does not fit {shape} and a table {tuple(table.shape)}")
        if any(m not in (1, n) for one in (vectors, table) for m, n in zip(one.shape[:2], shape[:2], strict=True)):
            raise ValueError(f"vectors {tuple(vectors.shape)} and a table {tuple(table.shape)} do not fit {shape}")
        terms.append(DistanceTerm(vectors, table, index, is_of_keys))
    rest = None if x["rest"] is None else require_bias(x["rest"], tensors)
    if not terms or (rest is not None and rest.dtype not in REAL):
        raise ValueError("products with distances need terms, and a bias of floating-point numbers")
    return DistanceProducts(tuple(terms), rest).expand(shape)


def require_rows(x: Tensor) -> Tensor:
    """Return x, which must be batch rows by index, int64 (b,)."""
    if x.dim() != 1 or x.dtype != torch.int64 or (len(x) and int(x.min()) < 0):
        raise ValueError(f"expected batch rows (b,), got {x.dtype} {tuple(x.shape)}")
    return x


def require_ids(x: Tensor) -> Tensor:
    """Return x, which must be token ids, int64 (b, t)."""
    if x.dim() != 2 or x.dtype != torch.int64:
        raise ValueError(f"expected token ids (b, t), got {x.dtype} {tuple(x.shape)}")
    return x
