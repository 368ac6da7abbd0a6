"""The shapes in which kernels break: lengths around blocks, widths that are no power of two, grouped heads, empty rows."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from regard.examination import mask_requirements
from regard.examination.kernel_checks.formula import AttentionFormula
from regard.mechanism import EVERYTHING, Mask

LENGTHS = (1, 15, 16, 17, 63, 64, 65, 127, 128, 129)  # around blocks of 16, 64 and 128
WIDTHS = (8, 20, 33, 80, 96)
GROUPS = ((4, 2), (6, 2), (4, 1))  # heads of queries and of keys
UNEQUAL = ((17, 40), (1, 65), (40, 17))  # queries and keys; the last has rows that see nothing if the last ones meet
LARGE, LARGE_HALF = 30.0, 8.0  # the size of inputs whose scores overflow an exponential
Offset = int | Literal["last"] | None


@dataclass(frozen=True)
class KernelShape:
    """The sizes of q (b, heads, queries, width) and of k and v (b, groups, keys, width), and the size of their numbers."""

    batch: int = 2
    heads: int = 2
    groups: int = 2
    queries: int = 17
    keys: int = 17
    width: int = 16
    size: float = 1.0

    def __str__(self) -> str:
        q = (self.batch, self.heads, self.queries, self.width)
        k = (self.batch, self.groups, self.keys, self.width)
        times = f", numbers times {self.size:g}" if self.size != 1 else ""
        return (f"q, k and v {q}" if q == k else f"q {q}, k and v {k}") + times


@dataclass(frozen=True, eq=False)
class KernelTask:
    """What a kernel is asked for: who sees whom, the scale, the position of the first query, the dtype and the device."""

    expects: Mask
    scale: float | None
    offset: Offset
    dtype: torch.dtype
    device: torch.device

    def get_offset(self, shape: KernelShape) -> int:
        """Return the position of the first query among the keys."""
        return shape.keys - shape.queries if self.offset == "last" else self.offset or 0

    def make_formula(self, shape: KernelShape, seed: int = 0) -> AttentionFormula:
        """Return the formula of seeded normal inputs in the kernel's dtype."""
        draw = torch.Generator().manual_seed(seed)

        def make_input(heads: int, tokens: int) -> Tensor:
            x = torch.randn(shape.batch, heads, tokens, shape.width, generator=draw, dtype=torch.float64) * shape.size
            return x.to(self.device, self.dtype)

        q, k, v = (make_input(*sizes) for sizes in ((shape.heads, shape.queries), *[(shape.groups, shape.keys)] * 2))
        seen = self.make_table(shape, self.get_offset(shape))
        return AttentionFormula(q, k, v, seen, shape.width**-0.5 if self.scale is None else self.scale)

    def make_table(self, shape: KernelShape, offset: int) -> Tensor:
        """Return who sees whom, bool (b, h, q, k)."""
        table = self.expects.table(shape.queries, shape.keys, offset).to(self.device)
        return table[(None,) * (4 - table.dim())].expand(shape.batch, shape.heads, -1, -1)

    def list_shapes(self) -> Iterator[KernelShape]:
        """Yield the shapes to try, small ones first; lengths and batches only if the mask allows others than its own."""
        usual = KernelShape(batch=mask_requirements.choose_batch_size(self.expects))
        count = self.expects.key_count
        if count is not None:
            usual = replace(usual, queries=count, keys=count)
        yield usual
        yield from (replace(usual, heads=heads, groups=groups) for heads, groups in GROUPS)
        yield from (replace(usual, width=width) for width in WIDTHS)
        if count is None:
            yield from (replace(usual, queries=t, keys=t) for t in LENGTHS)
            if self.offset is not None or self.expects == EVERYTHING:
                yield from (replace(usual, queries=q, keys=k) for q, k in UNEQUAL)
        yield replace(usual, size=LARGE if torch.finfo(self.dtype).bits >= 32 else LARGE_HALF)
