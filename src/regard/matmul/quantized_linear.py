"""Linear layers with weights of 16, 8 or 4 bits."""

from typing import Self

import torch
from torch import Tensor, nn

from regard.compiled import threads
from regard.compiled.kernel_choice import (
    count_least_vectors_for_tiles,
    count_least_vectors_in_bfloat16,
    count_least_vectors_in_pairs,
    count_vectors_at_a_time,
    is_bfloat16_product_faster,
)
from regard.compiled.matrix_formats import BLOCK, DTYPES, GROUP, GROUPS, SPAN, count_group_scales, pad_columns
from regard.errors import ConfigError, ShapeError
from regard.matmul.dequantized_weight import DequantizedWeight
from regard.matmul.float32_linear import (
    LEAST,
    can_bypass_torch,
    launch_product,
    linear,
    load_compiled_products,
    multiply_by_onednn,
)

WEIGHTS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "int8": torch.int8, "int4": torch.uint8}  # dtypes of values
SCALES = {torch.int8: torch.float32, torch.uint8: torch.bfloat16}  # dtypes of scales that compiled code reads
MOST = 16  # vectors up to which numbers of 16 bits are widened in registers; for more, the matrix is widened first, or tiled
ROWS = 1024  # rows widened at a time
MOST_EXACT = 2**14  # most integers of a matrix with which vectors are used as they are; compiled products of more are faster
NARROW = (torch.bfloat16, torch.float16)  # dtypes of vectors that are widened for compiled products
HALVES = (torch.float32, torch.bfloat16)  # what such products read
MOST_RESTORED = 2**22  # numbers of 8 or 4 bits that are restored at a time
TINY = torch.finfo(torch.float32).tiny


class QuantizedLinear(nn.Module):
    """x Wᵀ + b with W in fewer bits than float32, sums in float32.

    values (rows, n) are bfloat16, float16 or int8: then W[r] is scales[r] times integers from -127 to 127, times the integer
    from 0 to 255 of its group in group_scales (rows, groups), uint8: 16 groups in each 768 columns, of 48 numbers. values
    (rows, n / 2) of uint8 hold two integers from -8 to 7, n padded to a multiple of 64: each 32 of them have a scale and an
    offset in scales (rows, 2, n / 32), bfloat16. Source of these groups: Q4_1 of llama.cpp.

    x is used as it is, except for more than MOST_EXACT integers: then float32 vectors are rounded to integers of 16 bits, times
    a scale each. More is rounded for many vectors, by what the processor multiplies:

    - Pairs of bfloat16: x, W and the outputs are rounded to bfloat16, except of float16 (is_bfloat16_faster); of bfloat16, x is
      from 8 vectors on, unless it is float16 (uses_pairs), of int4, x and W are from 12 on.
    - Tiles of bfloat16 (AMX): so are x, and W of int8 and int4, for fewer vectors (uses_tiles).
    - AVX-512 alone: from 12 vectors on, the numbers of a row of int4 are rounded to integers up to 1365, times a scale.
    - Pairs of 16-bit integers added to a sum (AVX-512 VNNI): from 64 vectors on, those of int8 too, and the vectors to
      integers up to 8191.
    """

    def __init__(
        self,
        values: Tensor,
        scales: Tensor | None = None,
        bias: Tensor | None = None,
        columns: int | None = None,
        group_scales: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.values: Tensor
        self.scales: Tensor | None
        self.bias: Tensor | None
        self.group_scales: Tensor | None  # of int8; column c of each 768 is in group c % 32 // 2 of 16
        group_scales = check_group_scales(values, scales, group_scales)
        parts = {"values": values.contiguous(), "scales": scales, "bias": bias, "group_scales": group_scales}
        for name, x in parts.items():
            self.register_buffer(name, x)
        self.like: Tensor  # of the dtype of `weight`, which `to` changes
        self.register_buffer("like", values.new_empty(0, dtype=dtype), persistent=False)
        self.columns = columns or values.shape[1] * (2 if values.dtype == torch.uint8 else 1)

    @classmethod
    def from_weight(cls, weight: Tensor, bias: Tensor | None = None, to: str = "int8") -> Self:
        """Round weight (rows, n) to the nearest numbers of "bfloat16", "float16", "int8" or "int4"; a row of zeros stays zero.

        Raises ConfigError if a number is too large for float16.
        """
        dtype = weight.dtype
        weight, bias = weight.detach().float(), None if bias is None else bias.detach().clone()
        if bias is not None and bias.dtype in NARROW:
            bias = bias.float()  # which compiled products read
        if to == "int4":
            return cls(*round_to_int4(weight), bias, weight.shape[1], dtype=dtype)
        if to == "int8":
            values, scales, group_scales = round_to_int8(weight)
            return cls(values, scales, bias, group_scales=group_scales, dtype=dtype)
        values = weight.to(WEIGHTS[to])
        if not torch.equal(values.isfinite(), weight.isfinite()):
            raise ConfigError(f"a weight of {float(weight.abs().amax()):.3g} is too large for {to}. Use bfloat16.")
        return cls(values, None, bias, dtype=dtype)

    @property
    def weight(self) -> Tensor:
        """W (rows, n) in the dtype of the weight that was quantized, computed by each operation that reads it."""
        like = self._buffers.get("like")  # one that an older version pickled has none
        dtype = torch.float32 if like is None else like.dtype
        outline = torch.empty(len(self.values), self.columns, dtype=dtype, device="meta")
        return DequantizedWeight(outline, self.values.device, lambda: self.dequantize_rows(slice(None), dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Map x (..., n) to (..., rows)."""
        self.check_vectors(x)
        if self.is_bfloat16_faster(x):
            return self.multiply_in_bfloat16(x)
        wide = x.float() if x.dtype in NARROW and x.device.type == "cpu" else x
        if self.can_run_compiled(wide) and not (x.dtype == torch.float16 and self.rounds_vectors(wide)):
            found = wide.new_empty(*x.shape[:-1], len(self.values))
            launch_product([self.values, self.scales, self.bias, self.group_scales], wide, found)
            return found.to(x.dtype)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        if len(self.values) <= ROWS:
            return linear(x, self.dequantize_rows(slice(None), x.dtype), bias).to(x.dtype)
        found = x.new_empty(*x.shape[:-1], len(self.values))
        for start in range(0, len(self.values), ROWS):
            part = slice(start, start + ROWS)
            found[..., part] = linear(x, self.dequantize_rows(part, x.dtype))
        return found if bias is None else found.add_(bias)

    def check_vectors(self, x: Tensor) -> None:
        """Raise ConfigError or ShapeError if x is not floating, or its last axis has another size than the rows of W."""
        if not x.is_floating_point():
            raise ConfigError(f"the vectors must be of a floating dtype, got {x.dtype}. Convert them, e.g. by .float().")
        if x.shape[-1:] != (self.columns,):
            raise ShapeError(f"the vectors must be (..., {self.columns}), as the rows of the matrix; got {tuple(x.shape)}.")

    def multiply_in_bfloat16(self, x: Tensor) -> Tensor:
        """Compute x Wᵀ + b by oneDNN's products of bfloat16, with sums in float32; the outputs are rounded to bfloat16."""
        rows, vectors = len(self.values), x.bfloat16().flatten(0, -2)
        step = rows if self.values.dtype == torch.bfloat16 else max(MOST_RESTORED // self.columns, 1)
        most = count_vectors_at_a_time(len(vectors), rows)
        if step >= rows and most >= len(vectors):
            whole = multiply_by_onednn(vectors, self.restore_as_bfloat16(slice(rows)), self.bias)
            return whole.view(*x.shape[:-1], rows).to(x.dtype)
        found = x.new_empty(*x.shape[:-1], rows)
        for start in range(0, rows, step):
            part = slice(start, start + step)
            weight, bias = self.restore_as_bfloat16(part), None if self.bias is None else self.bias[part]
            for piece, out in zip(vectors.split(most), found.flatten(0, -2).split(most), strict=True):
                out[:, part] = multiply_by_onednn(piece, weight, bias)
        return found

    def restore_as_bfloat16(self, part: slice) -> Tensor:
        """Return rows of W rounded to bfloat16."""
        values = self.values[part]
        scales = None if self.scales is None else self.scales[part]
        is_readable = scales is not None and scales.dtype == SCALES[values.dtype] and not self.columns % BLOCK
        if not is_readable or not threads.can_run_loops():
            return self.dequantize_rows(part, torch.bfloat16).contiguous()  # oneDNN takes 1,000 times as long for a view
        from regard.matmul import numba_dequantize  # imports numba, which is installed if this is called

        found = values.new_empty(len(values), self.columns, dtype=torch.bfloat16)
        sizes = {"rows": len(values), "columns": self.columns, "format": DTYPES[values.dtype]}
        groups = None if self.group_scales is None else self.group_scales[part]
        arrays = {"numbers": values, "scales": scales, "group_scales": groups, "out": found}
        threads.run_callback(numba_dequantize.dequantize_shared, torch.get_num_threads(), **sizes, **arrays)
        return found

    def is_bfloat16_faster(self, x: Tensor) -> bool:
        """Return whether the product is faster in bfloat16, with an error that W's own rounding outweighs or equals."""
        least = count_least_vectors_in_bfloat16(self.values.dtype)
        if x.numel() < least * self.columns or len(self.values) * self.columns < LEAST:
            return False
        floats = [x] if self.bias is None else [x, self.bias]
        fits = x.shape[-1] == self.columns and self.is_on_device(x.device)
        return fits and can_bypass_torch(*floats, dtypes=HALVES) and is_bfloat16_product_faster(self.columns)

    def is_on_device(self, device: torch.device) -> bool:
        """Return whether all tensors of the layer are on a device."""
        return all(one.device == device for one in self._buffers.values() if one is not None)  # buffers() walks the modules

    def can_run_compiled(self, x: Tensor) -> bool:
        """Return whether the compiled product reads this matrix, and is faster than the others."""
        kind = self.values.dtype
        least = LEAST if kind.is_floating_point and not self.uses_tiles(x) else MOST_EXACT + 1
        if x.shape[-1] != self.columns or not x.numel() or len(self.values) * self.columns < least or kind not in DTYPES:
            return False
        if not self.is_on_device(x.device):  # torch raises the error
            return False
        if kind.is_floating_point and x.numel() > MOST * self.columns and not (self.uses_tiles(x) or self.uses_pairs(x)):
            return False
        can_read_groups = self.scales is not None and self.scales.dtype == torch.bfloat16
        if kind == torch.uint8 and not can_read_groups:
            return False
        floats = [x, *(one for one in (self.bias, self.scales if kind == torch.int8 else None) if one is not None)]
        return can_bypass_torch(*floats) and load_compiled_products() is not None and threads.find_barrier_address() != 0

    def uses_tiles(self, x: Tensor) -> bool:
        """Return whether the compiled product rounds x to bfloat16, and W of int8 or int4, and multiplies tiles of them."""
        least = count_least_vectors_for_tiles(self.values.dtype)
        return 0 < least * self.columns <= x.numel() and self.columns % BLOCK == 0

    def rounds_vectors(self, x: Tensor) -> bool:
        """Return whether the compiled product with W of bfloat16 rounds x to it too."""
        return self.values.dtype == torch.bfloat16 and (self.uses_tiles(x) or self.uses_pairs(x))

    def uses_pairs(self, x: Tensor) -> bool:
        """Return whether the compiled product rounds x to bfloat16, as W is, and multiplies pairs of them."""
        return self.values.dtype == torch.bfloat16 and 0 < count_least_vectors_in_pairs() * self.columns <= x.numel()

    def dequantize_rows(self, index: Tensor | slice, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return W[index]."""
        values, wide = self.values[index], torch.promote_types(dtype, torch.float32)
        if self.scales is None:
            return values.to(dtype)
        scales = self.scales[index].to(wide).unsqueeze(-1)
        if self.group_scales is not None:
            return dequantize_int8(values, scales * self.group_scales[index]).to(dtype)
        scales, offsets = scales.unbind(-3)  # (..., n / 32, 1) each
        pairs = values.view(torch.int8).unflatten(-1, (-1, 1, GROUP))  # of a number and the one 32 after it
        integers = torch.cat([(pairs << 4) >> 4, pairs >> 4], -2).flatten(-3, -2)  # (..., n / 32, 32)
        found = integers.to(wide).mul_(scales).add_(offsets).to(dtype).flatten(-2)
        return found[..., : self.columns]


def refuse_quantized(model: nn.Module) -> None:
    """Raise ConfigError if a model has quantized layers, whose numbers are not the weights that its file holds."""
    if any(isinstance(part, QuantizedLinear) for part in model.modules()):
        raise ConfigError(
            "a quantized model cannot be saved: save the model that it was made from, and quantise it after loading."
        )


def round_for_product(x: Tensor, *layers: nn.Module | None) -> Tensor:
    """Round x to bfloat16 if the first of some layers does so itself, and all of them can multiply numbers of bfloat16.

    What is computed from its outputs is then in bfloat16 too: the layers are those that read x, or what was computed from it.
    """
    first = layers[0]
    if not isinstance(first, QuantizedLinear) or not first.is_bfloat16_faster(x):
        return x
    can_multiply = all(isinstance(layer, QuantizedLinear) and is_bfloat16_product_faster(layer.columns) for layer in layers)
    return x.bfloat16() if can_multiply else x


def check_group_scales(values: Tensor, scales: Tensor | None, group_scales: Tensor | None) -> Tensor | None:
    """Return the scales of the groups of int8, ones by default, or raise ConfigError; None for other formats."""
    if values.dtype != torch.int8:
        if group_scales is not None:
            raise ConfigError(f"only integers of 8 bits have group_scales; the values are {values.dtype}.")
        return None
    expected = len(values), count_group_scales(values.shape[1])
    if group_scales is None:
        return values.new_ones(expected, dtype=torch.uint8)
    if scales is None or group_scales.dtype != torch.uint8 or group_scales.shape != expected:
        came = f"{group_scales.dtype} {tuple(group_scales.shape)}{'' if scales is not None else ' without scales'}"
        raise ConfigError(f"group_scales must be uint8 {expected}, beside scales of the rows; got {came}.")
    return group_scales.contiguous()


def round_to_int8(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return weight (rows, n) as int8 values (rows, n) times float32 scales (rows) times group scales (rows, g) in uint8."""
    rows, n = weight.shape
    scales = weight.abs().amax(-1) / (127 * 255)
    span = min(SPAN, -(-n // (2 * GROUPS)) * 2 * GROUPS)  # less for a narrow matrix, which has one span
    groups = nn.functional.pad(weight, (0, -n % span)).view(rows, -1, span // (2 * GROUPS), GROUPS, 2)
    largest = groups.abs().amax((2, 4), keepdim=True)
    steps = scales.view(-1, 1, 1, 1, 1)
    group_scales = (largest / (127 * steps).clamp_min(TINY)).ceil_().clamp_max_(255)  # rounded up, so that none exceeds 127
    values = (groups / (steps * group_scales).clamp_min(TINY)).round_().clamp_(-127, 127).to(torch.int8)
    return values.view(rows, -1)[:, :n], scales, group_scales.to(torch.uint8).view(rows, -1)


def dequantize_int8(values: Tensor, scales: Tensor) -> Tensor:
    """Multiply integers (..., n) by the scales of their groups (..., g), in the dtype of the scales."""
    n, width = values.shape[-1], 2 * GROUPS
    span = SPAN if n > SPAN else max(-(-n // width), 1) * width
    values = nn.functional.pad(values, (0, -n % span)) if n % span else values
    spans = values.shape[-1] // span
    pairs = scales.unsqueeze(-1).expand(*scales.shape, 2).reshape(*scales.shape[:-1], spans, 1, width)  # one for each column
    found = values.to(scales.dtype).view(*values.shape[:-1], spans, span // width, width).mul_(pairs).flatten(-3)
    return found[..., :n]


def round_to_int4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round weight (rows, n) to groups of 4-bit integers: return their bytes, and their scales and offsets (rows, 2, groups).

    The smallest number of a group becomes -8, the largest 7.
    """
    rows, n = weight.shape
    groups = nn.functional.pad(weight, (0, pad_columns(n) - n)).reshape(rows, -1, GROUP)
    low, high = groups.aminmax(dim=-1, keepdim=True)
    scales = ((high - low) / 15).bfloat16()
    offsets = (low + 8 * scales.float()).bfloat16()
    steps = (groups - offsets.float()) / scales.float().masked_fill(scales == 0, 1)
    values = steps.round_().clamp_(-8, 7).to(torch.int8).view(torch.uint8)
    first, second = values.view(rows, -1, 2, GROUP).unbind(-2)
    return ((first & 15) | (second << 4)).view(rows, -1), torch.stack([scales, offsets], 1).squeeze(-1)
