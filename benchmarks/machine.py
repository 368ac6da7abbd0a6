"""What the machine is, and what it can do: multiply-adds a second of a large matrix product."""

import platform
from pathlib import Path

import torch

from benchmarks.timing import seconds

SIZE = 3072


def describe() -> str:
    """The machine and the versions in a sentence."""
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else []
    name = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.processor())
    return (
        f"{torch.get_num_threads()} threads of {name}, {platform.system()}, Python {platform.python_version()}, "
        f"torch {torch.__version__}"
    )


def gigaflops(dtype: torch.dtype) -> float:
    """10⁹ floating-point operations a second, two to a multiply-add, of the best of ten products of two square matrices."""
    a, b = torch.randn(SIZE, SIZE).to(dtype), torch.randn(SIZE, SIZE).to(dtype)
    out = torch.empty(SIZE, SIZE, dtype=dtype)
    torch.mm(a, b, out=out)
    return 2 * SIZE**3 / min(seconds(lambda: torch.mm(a, b, out=out)) for _ in range(10)) / 1e9
