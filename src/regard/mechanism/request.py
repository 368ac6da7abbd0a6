"""The arguments of one call of attention, checked once and expanded to four axes."""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from regard.errors import ConfigError, ShapeError
from regard.mechanism.arguments import FLOATS, LARGEST_POSITION, check_floating, check_integer, check_number, describe_value
from regard.mechanism.mask_algebra import Mask, Offset, check_mask
from regard.mechanism.scores import default_scale, score_dtype

NEGLIGIBLE, INFINITE = 2.0**-150, 2.0**128 * (1 - 2.0**-25)  # what float32 rounds to 0 and to infinity


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
    rank: int  # of the input and of every result
    weight: Tensor | None = None  # (d,), of additive scores; None for dot products

    def list_offsets(self) -> int | tuple[int, ...]:
        """Return the offset of all batch rows, or one for each if they differ; synchronizes with a GPU."""
        if isinstance(self.offset, int):
            return self.offset
        offsets = tuple(self.offset.expand(len(self.q)).tolist())
        return offsets[0] if len(set(offsets)) == 1 else offsets

    def restore_rank(self, result: Tensor) -> Tensor:
        """Return a result of four axes in the rank of the input."""
        return result if self.rank == 4 else result[0] if self.rank == 3 else result[0, 0]


def make_request(
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
    """Build the request, or raise ShapeError or ConfigError that says what was expected, what came and what to do."""
    check_tensors(q, k, v)
    rank = q.dim()
    if is_autocast_on(q.device):
        q, k, v = autocast_tensor(q), autocast_tensor(k), autocast_tensor(v)
    if not rank == k.dim() == v.dim() == 4:
        q, k, v = (add_missing_axes(name, x, rank) for name, x in (("q", q), ("k", k), ("v", v)))
    check_matching_axes(q, k, v)
    scale, softcap, dropout = check_settings(mask, scale, softcap, dropout)
    b, h, t, _ = q.shape
    if bias is not None:
        check_floating("bias", bias, "Pass a bool table as mask=Given(table).")
        bias = add_bias_axes(bias, (b, h, t, k.shape[2]))
        if bias.dtype not in (q.dtype, score_dtype(q.dtype)):  # a kernel would misread the bytes of another dtype
            bias = bias.to(score_dtype(q.dtype))
    if sinks is not None:
        check_floating("sinks", sinks)
        if sinks.numel() != h or sinks.dim() > 1:
            raise ShapeError(f"sinks must be (h,), one for each head: expected ({h},), got {tuple(sinks.shape)}.")
        sinks = sinks.reshape(h)
    if type(offset) is not int or offset:
        offset = check_offset(offset, b, q.device)
    mask.check(t, k.shape[2], offset)
    mask = mask.for_keys(k.shape[2])
    if mask.batch not in (1, b) or mask.heads not in (1, h):
        raise ShapeError(f"{mask} is for (b, h) = ({mask.batch}, {mask.heads}), but q has ({b}, {h}).")
    scale = default_scale(q) if scale is None else round_scale(scale, q.dtype)
    return Request(q, k, v, mask, scale, softcap, bias, sinks, offset, dropout, rank)


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ConfigError unless q, k and v are dense floating tensors; called before torch.autocast casts them."""
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        raise ConfigError(f"q, k and v must be tensors, got {', '.join(map(describe_value, (q, k, v)))}.")
    if not (q.dtype in FLOATS and k.dtype in FLOATS and v.dtype in FLOATS):
        raise ConfigError(describe_wrong_dtypes(q, k, v))
    if not q.layout is k.layout is v.layout is torch.strided or q.is_nested or k.is_nested or v.is_nested:
        came = ", ".join(map(describe_value, (q, k, v)))
        raise ConfigError(f"q, k and v must be dense tensors, got {came}. Use .to_dense() or .to_padded_tensor(0).")


def describe_wrong_dtypes(q: Tensor, k: Tensor, v: Tensor) -> str:
    """Return the message for tensors that do not have one of the supported dtypes in common."""
    came = f"{q.dtype}, {k.dtype} and {v.dtype}"
    return f"q, k and v must have one floating dtype: float16, bfloat16, float32 or float64; got {came}. Use .to(dtype)."


def is_autocast_on(device: torch.device) -> bool:
    """Return whether torch.autocast is on for this device."""
    if not torch._C._is_any_autocast_enabled():
        return False
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def disable_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return a context manager that turns torch.autocast off on this device."""
    return torch.autocast(device.type, enabled=False) if is_autocast_on(device) else nullcontext()


def autocast_tensor(x: Tensor) -> Tensor:
    """Cast x to the dtype of torch.autocast; float64 is left as it is."""
    return x if x.dtype == torch.float64 else x.to(torch.get_autocast_dtype(x.device.type))


def check_matching_axes(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ShapeError if the axes of q, k and v do not agree, ConfigError if their dtypes or devices do not."""
    (b, h, _, d), (kb, g, keys, kd), (vb, vg, vkeys, e) = q.shape, k.shape, v.shape
    if kd != d:
        raise ShapeError(f"k is (b, g, k, d) = {(kb, g, keys, kd)}: its d is {kd}, but q's is {d}.")
    if not d:
        raise ShapeError("q and k have a width d of 0; it must be at least 1.")
    if kb != b:
        raise ShapeError(f"k is (b, g, k, d) = {(kb, g, keys, kd)}: its b is {kb}, but q's is {b}.")
    if not g or h % g:
        raise ShapeError(f"k is (b, g, k, d) = {(kb, g, keys, kd)}: its g is {g}, which does not divide q's h, {h}.")
    if (vb, vg, vkeys) != (kb, g, keys):
        raise ShapeError(f"v is (b, g, k, e) = {(vb, vg, vkeys, e)}: its b, g and k must be k's, {(kb, g, keys)}.")
    if not q.dtype == k.dtype == v.dtype:
        raise ConfigError(describe_wrong_dtypes(q, k, v))
    if not q.device == k.device == v.device:
        raise ConfigError(f"q, k and v must be on one device, got {q.device}, {k.device} and {v.device}. Use .to(device).")


def check_settings(
    mask: Mask, scale: float | None, softcap: float | None, dropout: float
) -> tuple[float | None, float | None, float]:
    """Return scale, softcap and dropout as floats, or raise ConfigError if a setting is impossible."""
    check_mask(mask)
    if isinstance(scale, Tensor):
        raise ConfigError(
            "scale must be a number, got a tensor. Multiply q by a learned scale: attention(q * scale, ..., scale=1)."
        )
    scale = None if scale is None else check_number("scale", scale, " or None for 1 / √d")
    if scale is not None and not math.isfinite(scale):
        raise ConfigError(f"scale must be finite, or None for 1 / √d; got {scale}.")
    softcap = None if softcap is None else check_number("softcap", softcap, " or None for no cap")
    if softcap is not None and not 0 < softcap < math.inf:
        raise ConfigError(f"softcap must be above 0 and finite, or None for no cap; got {softcap}.")
    return scale, softcap, check_probability(dropout)


def round_scale(scale: float, dtype: torch.dtype) -> float:
    """Return a scale that scores of inputs of this dtype can be multiplied by: 0 for one that is 0 in float32.

    Raises ConfigError for one that is infinite there.
    """
    if dtype == torch.float64:
        return scale
    if abs(scale) >= INFINITE:
        raise ConfigError(f"scale must be finite in float32, or None for 1 / √d; got {scale}. Multiply q by a part of it.")
    return scale if abs(scale) > NEGLIGIBLE else 0.0


def check_probability(dropout: float) -> float:
    """Return the dropout as a float, or raise ConfigError unless it is at least 0 and below 1."""
    dropout = check_number("dropout", dropout, " that is a probability")
    if not 0 <= dropout < 1:
        raise ConfigError(f"dropout must be a probability, at least 0 and below 1; got {dropout}.")
    return dropout


def add_missing_axes(name: str, x: Tensor, rank: int) -> Tensor:
    """Add the batch axis, and the heads axis if it is missing too, or raise ShapeError."""
    if rank not in (2, 3, 4) or x.dim() != rank:
        raise ShapeError(
            f"q, k and v must all be (b, h, t, d), all (h, t, d) or all (t, d); q has {rank} axes, {name} is {tuple(x.shape)}."
        )
    return x[(None,) * (4 - rank)]


def add_bias_axes(bias: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    """Return a bias with four axes, each of size 1 or that of (b, h, q, k), or raise ShapeError."""
    if bias.dim() > 4:
        raise ShapeError(f"bias must broadcast to (b, h, q, k) = {shape}, got {tuple(bias.shape)}.")
    bias = bias[(None,) * (4 - bias.dim())]
    if any(came not in (1, expected) for came, expected in zip(bias.shape, shape, strict=True)):
        raise ShapeError(f"bias must broadcast to (b, h, q, k) = {shape}, got {tuple(bias.shape)}.")
    return bias


def check_offset(offset: object, batch: int, device: torch.device) -> Offset:
    """Return an int, or an int64 offset per batch row on q's device, or raise ConfigError or ShapeError."""
    if not isinstance(offset, Tensor):
        return check_integer_offset(offset, ", or an int64 tensor (b,), one for each batch row")
    if offset.dtype != torch.int64 or offset.layout is not torch.strided:
        raise ConfigError(
            f"offset must be an int, or an int64 tensor (b,), one for each batch row; got {describe_value(offset)}."
        )
    if offset.dim() > 1 or (offset.dim() == 1 and len(offset) not in (1, batch)):
        raise ShapeError(f"offset must be an int, or (b,) = ({batch},); got {tuple(offset.shape)}.")
    if type(offset) is Tensor and offset.device.type == "cpu" and not torch.compiler.is_compiling():
        for position in offset.reshape(-1).tolist():
            check_integer_offset(position)
    return offset.to(device)


def check_integer_offset(offset: object, alternative: str = "") -> int:
    """Return an offset as an int, or raise ConfigError if it is none, or so large that sums with it overflow int64."""
    position = check_integer("offset", offset, alternative)
    if abs(position) > LARGEST_POSITION:
        raise ConfigError(
            f"offset is a position among the keys and must be between -2**61 and 2**61; got {describe_value(offset)}."
        )
    return position
