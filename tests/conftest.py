"""Settings for every test: hypothesis without a deadline; each process its share of cores.

In CI, hypothesis draws the same 60 examples each time; elsewhere 40 new ones, unless a test says how many it needs. On an
emulated processor it draws the same 10 (see processors.py). In CI on a slow processor, a test with many cases runs a third of
them.

With `-n 2`, as make runs them, processes take the files of tests in turn and share the threads: a test may
rely on nothing that a test of another file has made, and on no port, folder or moment of its own choice.
"""

import datetime
import os
import statistics
import time
import zlib
from collections import Counter
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


SLOW_SECONDS = 0.09  # for LOOP; a Cascade Lake at its 2.5 GHz takes 0.075, one that shares them 0.11 to 0.3
LOOP = 1_000_000
MANY_CASES = 9
PARTS = 3  # of the cases of a test


def measure_speed() -> float:
    """Return the seconds of processor time that a loop of Python takes, the median of nine."""
    seconds = []
    for _ in range(9):
        started, total = time.process_time(), 0
        for number in range(LOOP):
            total += number * number
        seconds.append(time.process_time() - started)
    return statistics.median(seconds)


is_first = "PYTEST_XDIST_WORKER" not in os.environ  # the others inherit what it sets: all must have the same tests
if os.environ.get("CI") and is_first and not EMULATED and "REGARD_TESTS_PART" not in os.environ:
    is_slow = measure_speed() > SLOW_SECONDS
    os.environ["REGARD_TESTS_PART"] = str(datetime.date.today().toordinal() % PARTS) if is_slow else ""


def deselect_cases(config: pytest.Config, items: list[pytest.Item], part: int) -> None:
    """Leave out all but a part of the cases of each test that has many, by the crc32 of their names."""
    counts = Counter((item.path, item.name.partition("[")[0]) for item in items)
    kept, left_out = [], []
    for item in items:
        test, _, case = item.name.partition("[")
        is_in_part = not case or counts[item.path, test] < MANY_CASES or zlib.crc32(case.encode()) % PARTS == part
        (kept if is_in_part else left_out).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which cases were left out."""
    if part := os.environ.get("REGARD_TESTS_PART"):
        terminalreporter.write_line(
            f"This processor is slow: of the tests with {MANY_CASES} cases or more, a third of the cases ran (number {part}), "
            "another third each day. All of them: REGARD_TESTS_PART= make test-all"
        )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out cases where the processor is slow; start the longest files first, so that no process works alone at the end."""
    if part := os.environ.get("REGARD_TESTS_PART"):
        deselect_cases(config, items, int(part))
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
