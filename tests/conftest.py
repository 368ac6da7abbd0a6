"""Settings for every test: hypothesis without a deadline; each process its share of cores.

In CI, hypothesis draws the same 60 examples each time; elsewhere 40 new ones, unless a test says how many it needs. On an
emulated processor it draws the same 10 (see processors.py).

With `-n 2`, as make runs them, processes take the files of tests in turn and share the threads: a test may
rely on nothing that a test of another file has made, and on no port, folder or moment of its own choice.
"""

import os
from pathlib import Path

import pytest
from hypothesis import settings

from example_count import EMULATED, limit_examples

settings.register_profile("here", deadline=None, print_blob=True, max_examples=40)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True, max_examples=60)
settings.register_profile("emulated", settings.get_profile("ci"), max_examples=limit_examples(100))
settings.load_profile("emulated" if EMULATED else "ci" if os.environ.get("CI") else "here")

FOLDER = Path(__file__).parent
LONGEST = (  # files that take minutes on two cores, the longest first; none of a browser, whose event loop stays in the process
    "head_atlas/test_build_atlas.py",
    "train/test_distributed.py",
    "compiled/test_jit_cache.py",
    "observe/interception/test_hf_registry.py",
    "recipes/test_lectures.py",
    "probe/test_probe_heads.py",
    "train/test_kill.py",
    "examination/test_right.py",
    "cli/test_examine.py",
    "notebooks/test_notebooks.py",
)
assert all((FOLDER / name).is_file() for name in LONGEST), "a file of LONGEST was renamed or removed"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the longest files first, so that no process works through one alone at the end; keep the order of the others."""
    places = {FOLDER / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


if together := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):  # before torch is imported, here and in processes that tests begin
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // int(together))))

DRIVERS = ("/proc/driver/nvidia", "/dev/dxg", "/dev/kfd")  # NVIDIA's, that of Windows' Linux, AMD's
if not any(map(os.path.exists, DRIVERS)):  # before triton is imported: its kernels are interpreted without a GPU
    os.environ.setdefault("TRITON_INTERPRET", "1")

if os.environ.get("REGARD_TESTS_WITHOUT_OPENMP"):  # see processors.py
    from regard.compiled import threads

    threads.find_torch_symbol = lambda name: None
