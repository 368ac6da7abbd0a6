"""What the machine is, and what it can do: multiply-adds a second of a large matrix product."""

import platform

import torch

from regard.compiled import choices, processor
from regard.machine import measure_products

SIDE, SECONDS = 3072, 3.0
VECTORS = {"avx512f": "AVX-512", "avx2": "AVX2", "sse2": "SSE", "neon": "NEON"}


def describe() -> str:
    """The machine and the versions in a sentence."""
    return (
        f"{torch.get_num_threads()} threads of {processor.read_name()}, {platform.system()}, "
        f"Python {platform.python_version()}, torch {torch.__version__}"
    )


def name_processor() -> str:
    """The processor and the widest instruction sets that the kernels may use, as the heading of its figures."""
    found = processor.features()
    vectors = next((title for name, title in VECTORS.items() if name in found), "no vector instructions that are known here")
    return f"{processor.read_name()} ({vectors}{', bfloat16' if 'avx512bf16' in found else ''})"


def list_kernels() -> str:
    """The kernels that regard takes on this processor, in a line."""
    return "; ".join(f"{task}: {kernel}" for task, kernel in choices.list_choices().items())


def gigaflops(dtype: torch.dtype) -> float:
    """10⁹ floating-point operations a second, two to a multiply-add, of the fastest product of two large square matrices."""
    return measure_products(dtype, side=SIDE, seconds=SECONDS) / 1e9
