"""The processor: its name, its instruction sets and what follows from them. Nothing else in the project reads these.

`NUMBA_CPU_NAME` and `NUMBA_CPU_FEATURES`, numba's own settings, narrow it to fewer instructions than the machine has: to test
the kernels of another processor on this one, or to share one cache of compiled code among the machines of a cluster.
"""

import os
import platform
from functools import cache
from pathlib import Path

import torch

CPUINFO = Path("/proc/cpuinfo")
ALIASES = {"fma3": "fma", "avx512_vpopcntdq": "avx512vpopcntdq"}  # torch's name: LLVM's
SSE = frozenset({"sse", "sse2"})
AVX2 = SSE | {"sse3", "ssse3", "sse4.1", "sse4.2", "popcnt", "avx", "avx2", "fma", "f16c", "bmi", "bmi2"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
NAMED = {  # the instruction sets of the names that LLVM has for processors; of any other name, the oldest x86-64
    "haswell": AVX2,
    "broadwell": AVX2,
    "skylake": AVX2,
    "x86-64-v3": AVX2,
    "znver1": AVX2,
    "znver2": AVX2,
    "znver3": AVX2,
    "skylake-avx512": AVX512,
    "x86-64-v4": AVX512,
    "cascadelake": AVX512 | {"avx512vnni"},
    "icelake-server": AVX512 | {"avx512vnni"},
    "cooperlake": AVX512 | {"avx512vnni", "avx512bf16"},
    "sapphirerapids": AVX512 | {"avx512vnni", "avx512bf16"},
    "znver4": AVX512 | {"avx512vnni", "avx512bf16"},
    "znver5": AVX512 | {"avx512vnni", "avx512bf16"},
}


@cache
def features() -> frozenset[str]:
    """The instruction sets that compiled code may use, by LLVM's names ("avx2", "avx512bf16")."""
    return narrow_features(read_host_features(), os.environ.get("NUMBA_CPU_NAME"), os.environ.get("NUMBA_CPU_FEATURES"))


def narrow_features(host: frozenset[str], name: str | None, listed: str | None) -> frozenset[str]:
    """The host's instruction sets, but for those that a name or a list ("+avx2,-avx512f") takes away."""
    if name is None and listed is None:
        return host
    chosen = set(NAMED.get(name.lower(), SSE)) if name is not None else set() if listed else set(SSE)
    for one in (listed or "").split(","):
        if one.startswith("+"):
            chosen.add(one[1:])
        elif one.startswith("-"):
            chosen.discard(one[1:])
    return frozenset(chosen & host)


@cache
def read_host_features() -> frozenset[str]:
    """The instruction sets of this machine's processor."""
    return frozenset(rename_feature(name) for name, there in torch.cpu.get_capabilities().items() if there is True)


def rename_feature(name: str) -> str:
    """LLVM's name of an instruction set that torch names "avx512_bf16" or "sse4_1"."""
    return name.replace("sse4_", "sse4.") if name.startswith("sse4_") else ALIASES.get(name, name.replace("avx512_", "avx512"))


@cache
def read_name() -> str:
    """The model name that the processor gives itself."""
    return str(torch.cpu.get_capabilities().get("cpu_name") or read_cpuinfo("model name") or platform.processor() or "unknown")


def is_intel() -> bool:
    """Return whether the processor is one of Intel's, for which MKL chooses its fastest code."""
    return (read_cpuinfo("vendor_id") or read_name()).replace("(R)", "").startswith(("GenuineIntel", "Intel"))


def read_cpuinfo(field: str) -> str:
    """A field of the first processor in /proc/cpuinfo; "" where there is no such file or field."""
    lines = CPUINFO.read_text(encoding="utf-8").splitlines() if CPUINFO.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), "")
