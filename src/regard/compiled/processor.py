"""The processor: its name, its instruction sets and its vendor. Nothing else in the project reads these.

numba's settings can narrow the instruction sets of compiled code: `NUMBA_CPU_NAME=haswell NUMBA_CPU_FEATURES=""` compiles for
an AVX2 processor, to test its kernels on a newer one or to share one cache among the machines of a cluster. Both are needed:
with a name alone numba adds the features of this machine.
"""

import ctypes
import importlib
import importlib.util
import platform
from functools import cache
from pathlib import Path
from typing import Any

import torch

CPUINFO = Path("/proc/cpuinfo")
ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA = 158, 0x1023, 18  # Linux's number of the call on x86-64, and what it is given
LLVM_NAMES = {  # torch's name: LLVM's name
    "fma3": "fma",
    "avx512_vpopcntdq": "avx512vpopcntdq",
    "amx_tile": "amx-tile",
    "amx_bf16": "amx-bf16",
    "amx_int8": "amx-int8",
}
SSE = frozenset({"sse", "sse2"})
AVX2 = SSE | {"sse3", "ssse3", "sse4.1", "sse4.2", "popcnt", "avx", "avx2", "fma", "f16c", "bmi", "bmi2"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
VNNI, BFLOAT16 = AVX512 | {"avx512vnni"}, AVX512 | {"avx512vnni", "avx512bf16"}
AMX = BFLOAT16 | {"amx-tile", "amx-bf16", "amx-int8", "avx512fp16"}
PROCESSORS = {  # instruction sets by LLVM's processor names; any other name stands for SSE
    **dict.fromkeys(("x86-64-v3", "core-avx2", "haswell", "broadwell", "skylake", "alderlake", "raptorlake"), AVX2),
    **dict.fromkeys(("znver1", "znver2", "znver3"), AVX2),
    **dict.fromkeys(("x86-64-v4", "skylake-avx512", "skx"), AVX512),
    **dict.fromkeys(("cascadelake", "icelake-client", "icelake-server", "tigerlake", "rocketlake"), VNNI),
    **dict.fromkeys(("cooperlake", "znver4", "znver5"), BFLOAT16),
    **dict.fromkeys(("sapphirerapids", "emeraldrapids", "graniterapids"), AMX),
}


@cache
def read_features() -> frozenset[str]:
    """Return the instruction sets that numba compiles for, by LLVM's names ("avx2", "avx512bf16")."""
    host = read_host_features()
    if not has_numba():
        return host
    config: Any = importlib.import_module("numba").config
    if not config.ENABLE_AVX:
        host = frozenset(name for name in host if not name.startswith("avx"))
    return narrow_features(host, config.CPU_NAME, config.CPU_FEATURES)


def narrow_features(host: frozenset[str], name: str | None, listed: str | None) -> frozenset[str]:
    """Return those of the host's instruction sets that a processor's name and a list ("+avx2,-avx512f") allow.

    The list adds to and removes from what the name stands for.
    """
    chosen = set(host) if name is None else set(PROCESSORS.get(name.lower(), SSE))
    for one in (listed or "").split(","):
        if one.startswith("+"):
            chosen.add(one[1:])
        elif one.startswith("-"):
            chosen.discard(one[1:])
    return frozenset(chosen & host)


@cache
def read_host_features() -> frozenset[str]:
    """Return the instruction sets of this machine's processor."""
    return frozenset(rename_feature(name) for name, has in torch.cpu.get_capabilities().items() if has is True)


@cache
def request_tiles() -> bool:
    """Ask Linux to let this process use the tile registers of AMX, and return whether it does; call it on x86-64 only.

    Source: Linux's Documentation/arch/x86/xstate.rst.
    """
    if platform.system() != "Linux":
        return False
    return bool(ctypes.CDLL(None).syscall(ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA) == 0)


def rename_feature(name: str) -> str:
    """Return LLVM's name of an instruction set that torch names "avx512_bf16" or "sse4_1"."""
    if name.startswith("sse4_"):
        return name.replace("_", ".")
    return LLVM_NAMES.get(name, name.replace("avx512_", "avx512"))


@cache
def read_processor_name() -> str:
    """Return the model name of the processor."""
    return str(read_cpuinfo("model name") or torch.cpu.get_capabilities().get("cpu_name") or platform.processor() or "unknown")


def is_intel() -> bool:
    """Return whether the processor is made by Intel, for which MKL chooses its fastest code."""
    return (read_cpuinfo("vendor_id") or read_processor_name()).replace("(R)", "").startswith(("GenuineIntel", "Intel"))


def read_cpuinfo(field: str) -> str:
    """Return a field of the first processor in /proc/cpuinfo; "" if there is no such file or field."""
    lines = CPUINFO.read_text(encoding="utf-8").splitlines() if CPUINFO.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), "")


@cache
def has_numba() -> bool:
    """Return whether numba is installed."""
    return importlib.util.find_spec("numba") is not None
