"""Multiply matrices whose buffers, and those of the vectors and outputs, each touch a page of memory that cannot be read.

A product that reads or writes beyond one of them ends the process. The last line that was printed says which one it was.
"""

import ctypes
import mmap
from itertools import product

import torch
from torch import Tensor

from regard.compiled import kernel_choice, threads
from regard.matmul import QuantizedLinear
from regard.matmul.float32_linear import launch_product

PAGE, NO_ACCESS = mmap.PAGESIZE, 0
INTEGERS = ("int8", "int4")
KINDS = ("float32", "bfloat16", "float16", *INTEGERS)
COUNTS = (1, 16, 17, 33)  # of vectors, 16 of which fill a tile; two tiles are multiplied at a time
SIZES = ((81, 64), (33, 832), (17, 1536), (5, 63), (50, 1543))  # rows, 16 of which fill a tile; columns, in spans of 768
run_callback = threads.run_callback


def place_at_guard_page(x: Tensor, at_end: bool) -> Tensor:
    """Return a copy of x that ends where a page without access begins, or begins where one ends."""
    size = -(-x.nbytes // PAGE) * PAGE
    memory = mmap.mmap(-1, PAGE + size + PAGE)
    start = PAGE + (size - x.nbytes if at_end else 0)
    copy = torch.frombuffer(memory, dtype=x.dtype, count=x.numel(), offset=start).view(x.shape).copy_(x)
    address = copy.data_ptr() - start
    for page in (address, address + PAGE + size):
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(page), ctypes.c_size_t(PAGE), NO_ACCESS) == 0
    return copy


def make_parts(kind: str, rows: int, columns: int) -> list[Tensor | None]:
    """Return a random matrix of a kind as `launch_product` reads it: its numbers, scales, bias and scales of groups."""
    weight, bias = torch.randn(rows, columns), torch.randn(rows)
    if kind == "float32":
        return [weight, None, bias, None]
    layer = QuantizedLinear.from_weight(weight, bias, kind)
    return [layer.values, layer.scales, layer.bias, layer.group_scales]


def multiply(parts: list[Tensor | None], x: Tensor) -> list[Tensor]:
    """Return the products with vectors, and the matrix in bfloat16 if it is one of integers."""
    values, scales, bias, group_scales = parts
    output = x.new_full((len(x), len(values)), torch.nan)
    launch_product(parts, x, output)
    if scales is None:
        return [output]
    return [output, QuantizedLinear(values, scales, bias, x.shape[1], group_scales).restore_as_bfloat16(slice(None))]


def multiply_at_guard_pages(parts: list[Tensor | None], x: Tensor, at_end: bool) -> list[Tensor]:
    """Return what `multiply` does: with all buffers at guard pages, those too that are allocated for a product."""

    def run_at_guard_pages(work, count, /, **arguments):
        tensors = {name: one for name, one in arguments.items() if isinstance(one, Tensor)}
        copies = {name: place_at_guard_page(one, at_end) for name, one in tensors.items()}
        run_callback(work, count, **arguments | copies)
        for name, one in tensors.items():
            one.copy_(copies[name])

    threads.run_callback = run_at_guard_pages
    try:
        return multiply([None if one is None else place_at_guard_page(one, at_end) for one in parts], x)
    finally:
        threads.run_callback = run_callback


def main() -> None:
    """Compare the products of all kinds and sizes with those of ordinary memory."""
    torch.manual_seed(0)
    for has_panels in (False, True) if kernel_choice.has_lookup_of_16_bits() else (False,):
        kernel_choice.count_least_vectors_for_panels = lambda least=int(has_panels): least  # 1, or 0: never
        for kind, (rows, columns), count in product(INTEGERS if has_panels else KINDS, SIZES, COUNTS):
            print(f"{kind}, {rows} rows, {columns} columns, {count} vectors, panels: {has_panels}", flush=True)
            parts, x = make_parts(kind, rows, columns), torch.randn(count, columns)
            expected = multiply(parts, x)
            for at_end in (True, False):
                found = multiply_at_guard_pages(parts, x, at_end)
                assert all(torch.equal(*both) for both in zip(found, expected, strict=True))


if __name__ == "__main__":
    main()
