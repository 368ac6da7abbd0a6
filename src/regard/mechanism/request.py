"""What a call of attention asks for, checked once and laid out on four axes."""

import math
import operator
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, SupportsIndex

import torch
from torch import Tensor

from regard.errors import ConfigError, ShapeError
from regard.mechanism.rule import FARTHEST, Mask, Offset, rule
from regard.mechanism.scores import default_scale, wide


class Request(NamedTuple):
    """The arguments of attention: q (b, h, q, d), k (b, g, k, d), v (b, g, k, e), bias with four axes, sinks (h,)."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask
    scale: float
    softcap: float | None
    bias: Tensor | None
    sinks: Tensor | None
    offset: Offset
    dropout: float
    rank: int  # of the input, and so of every result
    weight: Tensor | None = None  # (d,), of additive scores; None where a score is a dot product

    def restore(self, result: Tensor) -> Tensor:
        """A result of four axes in the rank of the input."""
        return result if self.rank == 4 else result[0] if self.rank == 3 else result[0, 0]


def ask(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    offset: Offset = 0,
    dropout: float = 0.0,
) -> Request:
    """The request, or ShapeError or ConfigError saying what was expected, what came and what to do."""
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        raise ConfigError(f"q, k and v must be tensors, got {', '.join(type(x).__name__ for x in (q, k, v))}.")
    rank = q.dim()
    if autocasts(q.device):
        q, k, v = autocast(q), autocast(k), autocast(v)
    if not rank == k.dim() == v.dim() == 4:
        q, k, v = (widened(name, x, rank) for name, x in (("q", q), ("k", k), ("v", v)))
    check_axes(q, k, v)
    check_settings(mask, scale, softcap, dropout)
    b, h, t, _ = q.shape
    if bias is not None:
        check_floating("bias", bias, " A bool table goes in Given(table).")
        bias = widened_bias(bias, (b, h, t, k.shape[2]))
        if bias.dtype not in (q.dtype, wide(q.dtype)):  # a kernel would read its numbers as those of another dtype
            bias = bias.to(wide(q.dtype))
    if sinks is not None:
        check_floating("sinks", sinks)
        if sinks.numel() != h or sinks.dim() > 1:
            raise ShapeError(f"sinks is (h,), one for each head: expected ({h},), got {tuple(sinks.shape)}.")
        sinks = sinks.reshape(h)
    if type(offset) is not int or offset:
        offset = checked_offset(offset, b, q.device)
    mask.check(t, k.shape[2], offset)
    if mask.batch not in (1, b) or mask.heads not in (1, h):
        raise ShapeError(f"{mask} is for (b, h) = ({mask.batch}, {mask.heads}), but q has ({b}, {h}).")
    scale = default_scale(q) if scale is None else float(scale)
    return Request(q, k, v, mask, scale, softcap, bias, sinks, offset, dropout, rank)


def check_floating(name: str, x: object, advice: str = "") -> None:
    """Raises ConfigError where something to be added among the scores is no floating tensor."""
    if not isinstance(x, Tensor):
        raise ConfigError(f"{name} must be a tensor, got {type(x).__name__}.")
    if not x.is_floating_point():
        raise ConfigError(f"{name} is added among the scores and must be floating, got {x.dtype}.{advice}")


def autocasts(device: torch.device) -> bool:
    """Whether torch.autocast is on for this device."""
    if not torch._C._is_any_autocast_enabled():
        return False
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def exactly(device: torch.device) -> AbstractContextManager[object]:
    """A context in which torch.autocast rounds nothing on this device."""
    return torch.autocast(device.type, enabled=False) if autocasts(device) else nullcontext()


def autocast(x: Tensor) -> Tensor:
    """What torch.autocast would hand a kernel; float64 is left as it is."""
    return x if x.dtype == torch.float64 else x.to(torch.get_autocast_dtype(x.device.type))


def check_axes(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raises where the axes, the dtypes or the devices of q, k and v do not agree."""
    (b, h, _, d), (kb, g, keys, kd), (vb, vg, vkeys, e) = q.shape, k.shape, v.shape
    if kd != d:
        raise ShapeError(f"k is (b, g, k, d) = {(kb, g, keys, kd)}: its d is {kd}, but q's is {d}.")
    if not d:
        raise ShapeError("q and k have a width d of 0; a query needs at least one number.")
    if kb != b:
        raise ShapeError(f"k is (b, g, k, d) = {(kb, g, keys, kd)}: its b is {kb}, but q's is {b}.")
    if not g or h % g:
        raise ShapeError(f"k is (b, g, k, d) = {(kb, g, keys, kd)}: its g is {g}, which does not divide q's h, {h}.")
    if (vb, vg, vkeys) != (kb, g, keys):
        raise ShapeError(f"v is (b, g, k, e) = {(vb, vg, vkeys, e)}: its b, g and k must be k's, {(kb, g, keys)}.")
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise ConfigError(f"q, k and v must have one floating dtype, got {q.dtype}, {k.dtype} and {v.dtype}. Use .to(dtype).")
    if not q.device == k.device == v.device:
        raise ConfigError(f"q, k and v must be on one device, got {q.device}, {k.device} and {v.device}. Use .to(device).")


def check_settings(mask: Mask, scale: float | None, softcap: float | None, dropout: float) -> None:
    """Raises where a setting is outside what is possible."""
    rule(mask)
    if isinstance(scale, Tensor):
        raise ConfigError("scale is a number, got a tensor. A learned scale multiplies q: attention(q * scale, ..., scale=1).")
    if scale is not None and not math.isfinite(scale):
        raise ConfigError(f"scale must be finite, or None for 1 / √d; got {scale}.")
    if softcap is not None and not 0 < softcap < math.inf:
        raise ConfigError(f"softcap must be above 0 and finite, or None for no cap; got {softcap}.")
    probability(dropout)


def probability(dropout: float | None) -> float:
    """The dropout, or ConfigError where it is no probability that leaves something."""
    if dropout is None or not 0 <= dropout < 1:
        raise ConfigError(f"dropout is a probability, at least 0 and below 1; got {dropout}.")
    return dropout


def widened(name: str, x: Tensor, rank: int) -> Tensor:
    """x with its batch axis, and its heads' where it has none either."""
    if rank not in (2, 3, 4) or x.dim() != rank:
        raise ShapeError(
            f"q, k and v are all (b, h, t, d), all (h, t, d) or all (t, d); q has {rank} axes, {name} is {tuple(x.shape)}."
        )
    return x[(None,) * (4 - rank)]


def widened_bias(bias: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    """A bias with four axes, each 1 or that of (b, h, q, k)."""
    if bias.dim() > 4:
        raise ShapeError(f"bias must broadcast to (b, h, q, k) = {shape}, got {tuple(bias.shape)}.")
    bias = bias[(None,) * (4 - bias.dim())]
    if any(came not in (1, expected) for came, expected in zip(bias.shape, shape, strict=True)):
        raise ShapeError(f"bias must broadcast to (b, h, q, k) = {shape}, got {tuple(bias.shape)}.")
    return bias


def checked_offset(offset: object, batch: int, device: torch.device) -> Offset:
    """An int, or an offset for each of the batch: int64, on the device of q."""
    if not isinstance(offset, Tensor) and isinstance(offset, SupportsIndex):
        check_position(operator.index(offset))
        return operator.index(offset)
    if not isinstance(offset, Tensor) or offset.dtype != torch.int64:
        came = f"a tensor of {offset.dtype}" if isinstance(offset, Tensor) else type(offset).__name__
        raise ConfigError(f"offset is an int, or an int64 tensor (b,), one for each of the batch; got {came}.")
    if offset.dim() > 1 or (offset.dim() == 1 and len(offset) not in (1, batch)):
        raise ShapeError(f"offset is an int, or (b,) = ({batch},); got {tuple(offset.shape)}.")
    if type(offset) is Tensor and offset.device.type == "cpu" and not torch.compiler.is_compiling():
        for position in offset.reshape(-1).tolist():
            check_position(position)
    return offset.to(device)


def check_position(offset: int) -> None:
    """Raise ConfigError where a position is so far away that sums with it would not be int64."""
    if abs(offset) > FARTHEST:
        raise ConfigError(f"offset is a position among the keys and must lie within -2**61 and 2**61; got {offset:.3g}.")
