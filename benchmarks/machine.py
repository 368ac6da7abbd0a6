"""What the machine is, and what it can do: multiply-adds a second of a large matrix product, bytes a second from memory."""

import platform

import torch

from regard.compiled import kernel_choice, processor
from regard.machine import measure_bandwidth, measure_product_rate

SIDE, BYTES, SECONDS = 3072, 2**29, 3.0
GPU_SIDE = 8192
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


def name_gpu() -> str:
    """The heading of the section of a GPU: its name."""
    return torch.cuda.get_device_name()


def describe_gpu() -> str:
    """The GPU, the versions, and the rate of large matrix products on it, in a sentence."""
    from triton import __version__ as triton

    rates = {
        dtype: measure_product_rate(dtype, "cuda", side=GPU_SIDE, seconds=1.0) / 1e12
        for dtype in (torch.float32, torch.bfloat16)
    }
    products = ", ".join(f"{rate:.0f} TFLOP/s in {str(dtype)[6:]}" for dtype, rate in rates.items())
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, Triton {triton}"
    return f"{name_gpu()}, {platform.system()}, {versions}. Products of large matrices: {products}"
