"""Run the numerical tests again as on processors with fewer instructions than this one.

`make test-all` ends with all of them, and `make test-ci` with one. Words select emulations by their names:
`python tests/processors.py haswell`.

ATEN_CPU_CAPABILITY, ONEDNN_MAX_CPU_ISA and MKL_ENABLE_INSTRUCTIONS narrow torch and its libraries, NUMBA_CPU_NAME and
NUMBA_CPU_FEATURES narrow the compiled kernels, OMP_NUM_THREADS sets the threads. MKL reads its variable on Intel's processors
only. The tests are the same; hypothesis draws a tenth of the examples (run_limits.py).
"""

import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from regard.compiled import processor

ROOT = Path(__file__).parents[1]
NUMERICAL = (
    "tests/map",
    "tests/mechanism",
    "tests/models/test_compiled_decoder.py",
    "tests/models/test_transformers_decoder.py",
    "tests/models/test_gpt2.py",
    "tests/generate",
    "tests/compiled",
    "tests/matmul",
    "tests/layers/test_gelu.py",
    "tests/train/test_fused_ops.py",
    "tests/train/test_training_loop.py",
    "tests/train/test_loss.py",
    "tests/train/test_optimizer.py",
)
KERNELS = (
    "tests/mechanism/test_cpu.py",
    "tests/mechanism/test_fused.py",
    "tests/mechanism/test_not_finite.py",
    "tests/compiled",
)
ELEMENTWISE = ("tests/layers/test_gelu.py", "tests/train/test_fused_ops.py")
BFLOAT16 = (*KERNELS, "tests/matmul", *ELEMENTWISE)  # with other code without it
SHORT = (  # what depends on how long a register is, and not only on what computes it
    "tests/map",
    "tests/mechanism",
    "tests/models/test_compiled_decoder.py",
    "tests/compiled",
    "tests/matmul",
    *ELEMENTWISE,
)
THREADS = (
    *KERNELS,
    "tests/matmul/test_numba_quantized.py",
    "tests/mechanism/test_additive.py",
    "tests/map/test_compiled_passes.py",
    "tests/map/test_attribution_passes.py",
)
COUNTS = re.compile(r"(\d+) (passed|failed|skipped|error)")


@dataclass(frozen=True)
class Emulation:
    """A processor that environment variables make of this one, which must have the instruction sets that it needs."""

    name: str
    environment: dict[str, str]
    needs: frozenset[str] = frozenset()
    tests: tuple[str, ...] = NUMERICAL


PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE"}  # waiting threads sleep: there are more of them than cores


def make_environment(numba: str, torch: str, onednn: str, mkl: str, threads: int) -> dict[str, str]:
    """The environment of a processor by the names that numba, torch, oneDNN and MKL have for it."""
    return {
        "NUMBA_CPU_NAME": numba,
        "NUMBA_CPU_FEATURES": "",
        "ATEN_CPU_CAPABILITY": torch,
        "ONEDNN_MAX_CPU_ISA": onednn,
        "MKL_ENABLE_INSTRUCTIONS": mkl,
        "OMP_NUM_THREADS": str(threads),
    }


EMULATIONS = (
    Emulation(
        "plain x86-64 (SSE2), 1 thread",
        make_environment("x86-64", "default", "SSE41", "SSE4_2", 1),
        processor.SSE,
        SHORT,
    ),
    Emulation(
        "haswell (AVX2), 3 threads",
        make_environment("haswell", "avx2", "AVX2", "AVX2", 3) | PASSIVE,
        processor.PROCESSORS["haswell"],
    ),
    Emulation(
        "cascadelake (AVX-512, no bfloat16), 1 thread",
        make_environment("cascadelake", "avx512", "AVX512_CORE_VNNI", "AVX512", 1),
        processor.PROCESSORS["cascadelake"] | {"avx512bf16"},  # which it hides: without it this is such a processor
        BFLOAT16,
    ),
    Emulation(
        "without numba, 3 threads", {"PYTHONPATH": str(ROOT / "tests" / "without_numba"), "OMP_NUM_THREADS": "3"} | PASSIVE
    ),
    Emulation(
        "without GNU's OpenMP, as on macOS, 1 thread",
        {"REGARD_TESTS_WITHOUT_OPENMP": "1", "OMP_NUM_THREADS": "1"},
        tests=THREADS,
    ),
)


def run(emulation: Emulation) -> tuple[str, bool]:
    """A line on the numerical tests under one emulation, and whether they passed."""
    missing = emulation.needs - processor.read_host_features()
    if missing:
        return f"{emulation.name}: skipped, this processor has no {' '.join(sorted(missing))}", True
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--quiet",
        "-m",
        "not slow or emulated",
        "-p",
        "no:cacheprovider",
        *emulation.tests,
    ]
    started = time.perf_counter()
    with TemporaryDirectory() as folder:  # torch.compile's own cache does not tell ATEN_CPU_CAPABILITY apart
        environment = {**os.environ, **emulation.environment, "REGARD_TESTS_EMULATED": "1", "TORCHINDUCTOR_CACHE_DIR": folder}
        ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    seconds = time.perf_counter() - started
    if ran.returncode:
        print(ran.stdout[-20_000:], ran.stderr[-5_000:], sep="\n")
    counts = ", ".join(f"{count} {what}" for count, what in COUNTS.findall(ran.stdout.splitlines()[-1] if ran.stdout else ""))
    return f"{emulation.name}: {counts}, {seconds:.0f} s", not ran.returncode


def main(names: list[str]) -> int:
    """Run the emulations whose names contain one of these words, or all, each in one process; return 1 if a test failed."""
    chosen = [one for one in EMULATIONS if not names or any(name in one.name for name in names)]
    cores = os.cpu_count() or 1
    print(f"On {processor.read_processor_name()}, {cores} cores:", flush=True)
    has_passed = True
    with ThreadPoolExecutor(cores) as pool:
        for line, passed in pool.map(run, chosen):
            print(line, flush=True)
            has_passed &= passed
    return 0 if has_passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
