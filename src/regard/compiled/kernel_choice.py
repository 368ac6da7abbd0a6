"""The instructions and kernels to use on this processor: one function per choice, with its measurement.

Speeds are measured by `python -m benchmarks kernels products loops`; docs/benchmarks.md has a section for each measured
processor. Where nothing was measured, the choice is torch's own kernel if torch has one.
"""

import math
from functools import cache

import torch

from regard.compiled import processor, threads
from regard.compiled.matrix_formats import TILE_COLUMNS


def count_float32_lanes() -> int:
    """Return how many float32 numbers a register holds: 16 (AVX-512), 8 (AVX2) or 4 (SSE, NEON)."""
    found = processor.read_features()
    return 16 if "avx512f" in found else 8 if "avx2" in found else 4


def choose_tile_rows() -> int:
    """Return the rows of a tile of sums two registers wide: 8 if there are 32 registers, 4 if there are 16."""
    return 8 if processor.read_features() & {"avx512f", "neon", "asimd"} else 4


def choose_prefetch_locality() -> int:
    """Return where compiled loops request what they read next: 3 for the L1 cache, 2 for the L2 cache, LLVM's numbers.

    On an AMD EPYC with AVX-512 (Zen 4), products of float32, bfloat16 and int8 with 4 to 16 vectors take 0.6 to 0.9 of the time
    with 2, those with one vector 0.85 to 1.0, and those of int4 as long. Others were not measured. A loop can request what it
    reads much later into the L2 cache.
    """
    return 2 if count_float32_lanes() == 16 and not processor.is_intel() else 3


def has_bfloat16_products() -> bool:
    """Return whether an instruction multiplies pairs of bfloat16; without it they are widened to float32.

    LLVM has no such instructions without those for whole registers of 16-bit numbers.
    """
    return count_float32_lanes() == 16 and {"avx512bf16", "avx512bw"} <= processor.read_features()


def is_bfloat16_product_faster(columns: int) -> bool:
    """Return whether oneDNN's product of bfloat16 is faster than its float32 one, and each output depends on its vector alone.

    On an AMD EPYC of family 26 (Zen 5) it takes half of the time, on an Intel Xeon with AMX 0.2 to 0.4. With AMX, oneDNN's
    product spreads NaN to the vector before unless the columns of the matrix fill its tiles, 32 in each.
    """
    spreads_nan = "amx-bf16" in processor.read_host_features() and columns % TILE_COLUMNS > 0
    return has_bfloat16_products() and has_onednn_linear() and not spreads_nan


def count_least_vectors_in_bfloat16(dtype: torch.dtype) -> float:
    """Return from how many vectors on oneDNN's product of bfloat16 is the fastest for a matrix of numbers of a dtype.

    Measured on an AMD EPYC of family 26 (Zen 5), for bfloat16 on one with AVX-512 of family 25 (Zen 4), whose compiled products
    take 0.6 to 0.9 of the time up to 64 vectors, and, with AMX, whose compiled products of tiles are as fast for 32 vectors, on
    an Intel Xeon of family 6, model 207.
    """
    counts = {torch.bfloat16: (65, 64), torch.int8: (128, 64), torch.uint8: (48, 64)}
    return counts[dtype][has_tiles()] if dtype in counts else math.inf


def count_vectors_at_a_time(count: int, rows: int) -> int:
    """Return how many of a number of vectors oneDNN's product of bfloat16 multiplies at a time with a matrix of many rows.

    With AMX it leaves one of two threads idle where there are as many vectors as rows or up to 1.8 times as many: 1,000 vectors
    times 768 x 768 numbers take 0.78 of the time in parts of 500, times 768 x 3,072 numbers 0.67. A part has at most 640.
    Measured on an Intel Xeon of family 6, model 207, for 576, 768 and 1,024 rows; for 192 and for 1,536 or more, a part takes
    longer.
    """
    is_idle = has_tiles() and torch.get_num_threads() == 2 and 512 <= rows <= 1024 and rows <= count < 1.8 * rows
    return math.ceil(count / math.ceil(count / 640)) if is_idle else max(count, 1)


def count_least_vectors_for_tiles(dtype: torch.dtype) -> int:
    """Return from how many vectors on compiled products of a matrix of a dtype multiply tiles of bfloat16 (AMX); 0 if never.

    On an Intel Xeon of family 6, model 207, int8 takes 0.6 to 0.7 of the time of sums in registers for 10 vectors and 0.75 to
    0.9 for 12, which fill these best; 8 take 0.9 or more. int4 takes 0.8 for 7 vectors and 0.5 for 12, bfloat16 0.6 for 16.
    """
    return {torch.bfloat16: 6, torch.int8: 10, torch.uint8: 7}.get(dtype, 0) if can_use_tiles() else 0


def count_least_vectors_in_pairs() -> int:
    """Return from how many vectors on compiled products of a matrix of bfloat16 multiply pairs of bfloat16; 0 if never.

    On an AMD EPYC with AVX-512 (Zen 4), 8 to 16 vectors take 0.6 to 0.8 of the time of numbers widened to float32.
    """
    return 8 if has_bfloat16_products() and not can_use_tiles() else 0


def has_onednn_linear() -> bool:
    """Return whether oneDNN's linear layer can be called by name."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def count_least_restored_vectors() -> int:
    """Return from how many vectors on the compiled product of int4 restores its rows to numbers of 16 bits; 0 if never.

    To bfloat16 where pairs of it are multiplied: on an AMD EPYC of family 26 (Zen 5), 12 vectors take 0.75 to 0.9 of the time
    of integers with a scale for each group, 16 take 0.65 to 0.85. Else to integers.
    """
    return 12 if has_lookup_of_16_bits() else 0


@cache
def count_least_vectors_for_panels() -> int:
    """Return from how many vectors on int8 and int4 are multiplied by panels of restored rows; 0 if never.

    On an Intel Xeon (Cascade Lake), 1,000 vectors take 0.6 of the time of tiles of rows in int8 and 0.5 in int4; at 64 vectors
    both take about as long. With AMX, they multiply what oneDNN's product of bfloat16 does not.
    """
    is_needed = has_tiles() or not is_bfloat16_product_faster(TILE_COLUMNS)
    return 64 if adds_int16_products() and has_lookup_of_16_bits() and is_needed else 0


def has_lookup_of_16_bits() -> bool:
    """Return whether an instruction looks up 32 numbers of 16 bits at once."""
    return count_float32_lanes() == 16 and "avx512bw" in processor.read_features()


def find_int16_instruction() -> str | None:
    """Return LLVM's name of the instruction that multiplies 16-bit numbers and adds neighbors; None if LLVM finds its own."""
    found, lanes = processor.read_features(), count_float32_lanes()
    if lanes == 16 and "avx512bw" in found:
        return "llvm.x86.avx512.pmaddw.d.512"
    return "llvm.x86.avx2.pmadd.wd" if lanes == 8 else None


def adds_int16_products() -> bool:
    """Return whether an instruction multiplies 16-bit numbers and adds neighbors to a sum (AVX-512 VNNI)."""
    return count_float32_lanes() == 16 and "avx512vnni" in processor.read_features()


def has_float16_conversion() -> bool:
    """Return whether an instruction widens float16 to float32; without it shifts and a product do."""
    return bool(processor.read_features() & {"f16c", "avx512f"})


@cache
def find_onednn_limit() -> float:
    """Return the largest number of vectors for which oneDNN's float32 product is faster than MKL's, torch's choice; 0 if none.

    On an AMD EPYC with AVX-512 (Zen 4), MKL reaches half of oneDNN's rate for any number. With AVX2 (Zen 3), oneDNN takes 0.5
    to 1.0 of MKL's time up to 64 vectors, and up to 1.25 of it for more. On Intel, MKL is faster on a Cascade Lake (262 to 236
    GFLOP/s on two threads), and neither is on a Xeon with AMX (0.9 to 1.06 from 16 vectors on, for most sizes). Other
    processors were not measured.
    """
    if not torch.backends.mkl.is_available() or not has_onednn_linear() or processor.is_intel():
        return 0
    found = processor.read_features()
    return math.inf if "avx512f" in found else 64 if "avx2" in found else 0


@cache
def count_most_compiled_vectors() -> int:
    """Return up to how many vectors the compiled product of float32 is faster than a library's.

    With AVX-512 on Intel, where the library is MKL, 8 vectors take 0.5 to 0.6 of its time and 16 take 0.6 to 0.7. On AMD, where
    it is oneDNN, 8 and 16 take 0.5 to 0.6 with AVX-512 (Zen 4), 32 take 0.75, and 64 take 0.85 to 0.9; with AVX2 (Zen 3), 8
    take 0.9.
    """
    if count_float32_lanes() < 16:
        return 4
    return 16 if processor.is_intel() else 64


def count_vectors_in_one_call(dtype: torch.dtype) -> int:
    """Return for how many vectors at a time a decoder in one compiled call is faster than layer by layer.

    With registers of 16 lanes, one call takes 0.7 to 0.9 of the time for 32 vectors in every format, and 0.8 to 1.0 for 64 (AMD
    Zen 5). A tile of sums is half as large with 8 lanes, where float32 was faster up to 4 vectors and fewer bits up to 16.
    """
    if count_float32_lanes() == 16:
        return 32
    return 4 if dtype == torch.float32 else 16


def is_attention_compiled() -> bool:
    """Return whether attention on this processor can use the compiled loops and they are not slower than torch's kernel.

    They were measured to be faster with registers of 16 and of 8 lanes; 4 lanes were not measured.
    """
    return threads.can_run_loops() and count_float32_lanes() >= 8


def is_torch_attention_faster(dtype: torch.dtype, is_one_call: bool, is_whole: bool, learns: bool) -> bool:
    """Return whether torch's kernel is nevertheless faster than the compiled loops, for 2**19 weights or more.

    is_one_call: whether torch's kernel computes the mask in one call (no mask, or causal) rather than in blocks of queries;
    is_whole: whether there is no mask. Measured on an Intel Xeon with AMX and AVX10.1, 12 heads of 64, T from 256 to 8,192. In
    bfloat16, whose products torch computes by tiles (AMX), torch's kernel takes 0.24 to 0.46 of the loops' time for one call
    and 0.61 to 0.73 in blocks; with a gradient 0.41 to 1.04 for one call, and 1.3 to 1.4 in blocks. In float32, whose products
    MKL computes, it takes 0.66 to 0.91 without a mask, 0.7 to 1.2 with a gradient; with a mask the loops win or are equal. On
    an Intel Xeon with AVX-512 alone it takes 0.81 to 1.07 in float32 without a mask, and 0.82 in bfloat16 without a gradient.
    """
    if not has_tiles():
        return is_intel_without_tiles() and is_whole and (dtype == torch.float32 or not learns)
    if dtype == torch.bfloat16:
        return is_one_call or not learns
    return is_whole


def is_intel_without_tiles() -> bool:
    """Return whether the processor is one of Intel's with AVX-512 and without AMX."""
    return processor.is_intel() and count_float32_lanes() == 16 and not has_tiles()


def has_tiles() -> bool:
    """Return whether the processor multiplies tiles of bfloat16 (AMX), as torch's products do."""
    return "amx-bf16" in processor.read_features()


@cache
def can_use_tiles() -> bool:
    """Return whether compiled products can multiply tiles of bfloat16 (AMX): Linux has to allow it.

    Those of int8 also need instructions for float16, which each processor with AMX has.
    """
    has_instructions = {"amx-tile", "amx-bf16", "avx512fp16"} <= processor.read_features() and has_bfloat16_products()
    return has_instructions and processor.request_tiles()


def list_choices() -> dict[str, str]:
    """Return a description of the kernel for each task on this processor."""
    usable, bits = threads.can_run_loops(), f"{32 * count_float32_lanes()} bits"
    limit, library = find_onednn_limit(), "torch's library"
    if limit:
        library = "oneDNN" if math.isinf(limit) else f"oneDNN up to {limit}, {library}"
    few, more = ("compiled for a few vectors, ", " for more") if usable else ("", "")
    panels = f", restored from {count_least_vectors_for_panels()} vectors on" if count_least_vectors_for_panels() else ""
    is_in_bfloat16 = is_bfloat16_product_faster(TILE_COLUMNS)
    many = ", oneDNN of bfloat16 for more" if is_in_bfloat16 else panels
    in_tiles = f"by AMX from {count_least_vectors_for_tiles(torch.bfloat16)} vectors on, " if usable and can_use_tiles() else ""
    in_pairs = f"in pairs from {count_least_vectors_in_pairs()} on, " if usable and count_least_vectors_in_pairs() else ""
    halves = "the bfloat16 instruction" if has_bfloat16_products() else f"float32 of {bits}, widened"
    whole = "; without a mask torch's kernel" if has_tiles() or is_intel_without_tiles() else ""
    tiles = "torch's kernel by AMX; masks in training: " if has_tiles() else ""
    untrained = "; without a mask, unless in training, torch's kernel" if is_intel_without_tiles() else ""
    widest = "oneDNN of bfloat16" if is_in_bfloat16 else "widened to float32"
    bytes_by = f"16-bit products of {bits}" if find_int16_instruction() else f"16-bit products as LLVM compiles them for {bits}"
    return {
        "attention, float32": f"compiled loops of {bits}{whole}" if is_attention_compiled() else "torch's kernel",
        "attention, bfloat16": f"{tiles}compiled loops, {halves}{untrained}" if is_attention_compiled() else "torch's kernel",
        "attention, additive": f"compiled loops of {bits}" if usable else "torch",
        "maps": f"compiled loops of {bits}" if processor.has_numba() else "torch, block by block",
        "products, float32": f"{few}{library}{more}",
        "products, bfloat16": f"{few}{in_tiles}{in_pairs}{widest}{more}",
        "products, int8": (f"compiled, {bytes_by}" if usable else "torch, widened to float32") + many,
        "generation": "a step of GPT-2, Llama, Mistral or Qwen2 in one compiled call"
        if usable and threads.find_barrier_address()
        else "torch, layer by layer",
        "training": "compiled cross entropy and GELU" if usable else "torch",
    }
