"""The instructions and kernels to use on this processor: one function per choice, with its measurement.

Speeds are measured by `python -m benchmarks kernels products`; docs/benchmarks.md has a section for each measured
processor. Where nothing was measured, the choice is torch's own kernel if torch has one.
"""

import math
from functools import cache

import torch

from regard.compiled import processor, threads


def count_float32_lanes() -> int:
    """Return how many float32 numbers a register holds: 16 (AVX-512), 8 (AVX2) or 4 (SSE, NEON)."""
    found = processor.read_features()
    return 16 if "avx512f" in found else 8 if "avx2" in found else 4


def choose_tile_rows() -> int:
    """Return the rows of a tile of sums two registers wide: 8 if there are 32 registers, 4 if there are 16."""
    return 8 if processor.read_features() & {"avx512f", "neon", "asimd"} else 4


def has_bfloat16_products() -> bool:
    """Return whether an instruction multiplies pairs of bfloat16; without it they are widened to float32."""
    return count_float32_lanes() == 16 and "avx512bf16" in processor.read_features()


def find_int16_instruction() -> str | None:
    """Return LLVM's name of the instruction that multiplies 16-bit numbers and adds neighbors; None if LLVM finds its own."""
    found, lanes = processor.read_features(), count_float32_lanes()
    if lanes == 16 and "avx512bw" in found:
        return "llvm.x86.avx512.pmaddw.d.512"
    return "llvm.x86.avx2.pmadd.wd" if lanes == 8 else None


@cache
def find_onednn_limit() -> float:
    """Return the largest number of vectors for which oneDNN's float32 product is faster than MKL's, torch's choice; 0 if none.

    On an AMD EPYC with AVX-512 (Zen 4), MKL reaches half of oneDNN's rate for any number. With AVX2 (Zen 3), oneDNN takes 0.5
    to 1.0 of MKL's time up to 64 vectors, and up to 1.25 of it for more. On Intel, MKL is faster: 262 to 236 GFLOP/s on two
    threads of a Cascade Lake. Other processors were not measured.
    """
    has_both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    if not has_both or not hasattr(torch.ops.mkldnn, "_linear_pointwise") or processor.is_intel():
        return 0
    found = processor.read_features()
    return math.inf if "avx512f" in found else 64 if "avx2" in found else 0


def is_attention_compiled() -> bool:
    """Return whether attention on this processor uses the compiled loops rather than torch's kernel.

    They were measured to be faster with registers of 16 and of 8 lanes; 4 lanes were not measured.
    """
    return threads.can_run_loops() and count_float32_lanes() >= 8


def list_choices() -> dict[str, str]:
    """Return a description of the kernel for each task on this processor."""
    usable, bits = threads.can_run_loops(), f"{32 * count_float32_lanes()} bits"
    limit, library = find_onednn_limit(), "torch's library"
    if limit:
        library = "oneDNN" if math.isinf(limit) else f"oneDNN up to {limit}, {library}"
    halves = "the bfloat16 instruction" if has_bfloat16_products() else f"float32 of {bits}, widened"
    bytes_by = f"16-bit products of {bits}" if find_int16_instruction() else f"16-bit products as LLVM compiles them for {bits}"
    return {
        "attention, float32": f"compiled loops of {bits}" if is_attention_compiled() else "torch's kernel",
        "attention, bfloat16": f"compiled loops, {halves}" if is_attention_compiled() else "torch's kernel",
        "attention, additive": f"compiled loops of {bits}" if usable else "torch",
        "maps": f"compiled loops of {bits}" if processor.has_numba() else "torch, block by block",
        "products, float32": f"compiled for a few vectors, {library} for more" if usable else library,
        "products, int8": f"compiled, {bytes_by}" if usable else "torch, widened to float32",
        "generation": "a step of GPT-2 in one compiled call"
        if usable and threads.find_barrier_address()
        else "torch, layer by layer",
        "training": "compiled cross entropy and GELU" if usable else "torch",
    }
