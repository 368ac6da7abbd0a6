"""Positions of what kernels and resampling make of images: the center of what they read, on a regular lattice."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

SAME_POSITION = 1e-6  # pixels
FIRST = 2**16  # the row and column of the first pixel, so that no center of what lies before it is at 0, which is none
CPU = torch.device("cpu")  # where positions are, so that no other device waits


def stride_positions(
    x: Tensor, positions: Tensor, y: Tensor, kernel: Any, stride: Any, padding: Any, dilation: Any
) -> Tensor | None:
    """Return the positions of what a kernel makes of x (b, c, rows, columns): of its center, on a regular lattice."""
    positions = average(positions, 1, True)
    steps = make_pair(stride)
    if y.shape[2:] == x.shape[2:] and steps == (1, 1):
        return positions
    if isinstance(padding, str):
        padding = 0 if padding == "valid" else None
    if x.dim() != 4 or padding is None:
        return None
    zipped = zip(y.shape[2:], steps, make_pair(padding), make_pair(kernel), make_pair(dilation), strict=True)
    firsts, centers = [], []
    for (n, step, pad, side, dilated), size in zip(zipped, x.shape[2:], strict=True):
        first = torch.arange(n, device=CPU) * step - pad
        firsts.append(first.clamp(0, size - 1))
        centers.append(first + dilated * (side - 1) / 2)
    return resample_lattice(x, positions, firsts, centers)


def scale_positions(x: Tensor, positions: Tensor, y: Tensor) -> Tensor | None:
    """Return the positions of y, x (b, c, rows, columns) that is enlarged or made smaller by whole numbers."""
    sizes = [*zip(x.shape[2:], y.shape[2:], strict=False)]
    if x.dim() != 4 or y.dim() != 4 or any(max(one) % max(min(one), 1) for one in sizes):
        return None
    centers = [(torch.arange(new, device=CPU, dtype=torch.float64) + 0.5) * old / max(new, 1) - 0.5 for old, new in sizes]
    firsts = [center.round().long().clamp(0, old - 1) for center, (old, _) in zip(centers, sizes, strict=True)]
    return resample_lattice(x, average(positions, 1, True), firsts, centers)


def resample_lattice(x: Tensor, positions: Tensor, nearest: list[Tensor], centers: list[Tensor]) -> Tensor | None:
    """Return positions at `centers`, in rows and columns of x (b, c, rows, columns); None if x has no regular lattice.

    Where the position of the `nearest` row and column is not known, it is 0.
    """
    positions = positions.expand(-1, -1, *x.shape[2:])
    start = positions[..., :1, :1]
    down, across = (one - start if one.numel() else 0 * start for one in (positions[..., 1:2, :1], positions[..., :1, 1:2]))
    lattice = start + sum_steps(down, across, *(torch.arange(n, device=CPU) for n in x.shape[2:]))
    if not bool(((positions == 0) | ((positions - lattice).abs() < SAME_POSITION)).all()):
        return None
    is_inside = positions[..., nearest[0], :][..., nearest[1]] != 0
    return (start + sum_steps(down, across, *centers)) * is_inside


def average(positions: Tensor, dims: int | Sequence[int], keeps: bool) -> Tensor:
    """Return the mean of positions over dimensions, 0 where one of them is."""
    dims = (dims,) if isinstance(dims, int) else tuple(dims)
    if keeps and all(positions.shape[dim] == 1 for dim in dims):
        return positions
    return positions.mean(dims, keepdim=keeps) * (positions != 0).all(dims, keepdim=keeps)


def sum_steps(down: Tensor, across: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Return the distances (..., rows, columns) from the first position of a lattice."""
    return rows[:, None] * down + columns * across


def make_pair(value: Any) -> tuple[int, int]:
    """Return a number for each of two axes."""
    one, other = (value, value) if isinstance(value, int) else (*value, *value)[:2]
    return one, other


def read_convolution(
    input: Tensor, weight: Tensor, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: Any = 1
) -> tuple[Any, Any, Any, Any]:
    """Return the kernel, stride, padding and dilation of a call of conv2d."""
    return tuple(weight.shape[2:]), stride, padding, dilation


def read_max_pool(
    input: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, *_: Any, **__: Any
) -> tuple[Any, Any, Any, Any]:
    """Return the kernel, stride, padding and dilation of a call of max_pool2d."""
    return kernel_size, stride or kernel_size, padding, dilation


def read_mean_pool(
    input: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, *_: Any, **__: Any
) -> tuple[Any, Any, Any, Any]:
    """Return the kernel, stride, padding and dilation of a call of avg_pool2d."""
    return kernel_size, stride or kernel_size, padding, 1


READERS: dict[str, Callable[..., tuple[Any, Any, Any, Any]]] = {
    "conv2d": read_convolution,
    "max_pool2d": read_max_pool,
    "avg_pool2d": read_mean_pool,
}
