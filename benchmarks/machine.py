"""What the machine is, and what it can do: multiply-adds a second of a large matrix product, bytes a second from memory."""

import platform

import torch

from regard.compiled import kernel_choice, processor
from regard.machine import measure_bandwidth, measure_product_rate

SIDE, BYTES, SECONDS = 3072, 2**29, 3.0
VECTORS = {"avx512f": "AVX-512", "avx2": "AVX2", "sse2": "SSE", "neon": "NEON"}


def describe() -> str:
    """The machine and the versions in a sentence."""
    return (
        f"{torch.get_num_threads()} threads of {processor.read_processor_name()}, {platform.system()}, "
        f"Python {platform.python_version()}, torch {torch.__version__}"
    )


def name_processor() -> str:
    """The heading of a section: the processor, its model, the widest instruction sets that kernels may use, and the threads."""
    found = processor.read_features()
    sets = [title for name, title in VECTORS.items() if name in found][:1]
    sets += ["bfloat16"] * ("avx512bf16" in found) + ["AMX"] * kernel_choice.has_tiles()
    fields = [f"{field.removeprefix('cpu ')} {processor.read_cpuinfo(field)}" for field in ("cpu family", "model\t")]
    model = [" ".join(field.split()) for field in fields if field.split()[-1:] and field.split()[-1].isdigit()]
    return f"{processor.read_processor_name()} ({', '.join([*model, *sets, f'{torch.get_num_threads()} threads'])})"


def list_kernels() -> str:
    """The kernels that regard takes on this processor, in a line."""
    return "; ".join(f"{task}: {kernel}" for task, kernel in kernel_choice.list_choices().items())


def gigaflops(dtype: torch.dtype) -> float:
    """10⁹ floating-point operations a second, two to a multiply-add, of the fastest product of two large square matrices."""
    return measure_product_rate(dtype, side=SIDE, seconds=SECONDS) / 1e9


def gigabytes() -> float:
    """10⁹ bytes a second that all threads read from memory, of 512 MiB, more than the caches hold."""
    return measure_bandwidth(size=BYTES, seconds=SECONDS) / 1e9
