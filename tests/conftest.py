"""Settings for every test: hypothesis without a deadline; each process its share of cores.

In CI, hypothesis draws the same 40 examples each time; elsewhere 20 new ones, unless a test says how many it needs. On an
emulated processor it draws the same 10 (see processors.py).

Where REGARD_TESTS_MINUTES is set, as in .ci/run, a test with many cases runs a third of them once the run has taken so long,
after twice that a ninth, and so on. Slow tests with few cases run on every third day from twice that on, and all others from
three times. Each day other cases run, and other files come first.

With `-n 2`, as make runs them, processes take the files of tests in turn and share the threads: a test may
rely on nothing that a test of another file has made, and on no port, folder or moment of its own choice.
"""

import datetime
import os
import time
import zlib
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import settings

from run_limits import EMULATED, MINUTES, limit_examples

settings.register_profile("here", deadline=None, print_blob=True, max_examples=20)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True, max_examples=40)
settings.register_profile("emulated", settings.get_profile("ci"), max_examples=limit_examples(100))
settings.load_profile("emulated" if EMULATED else "ci" if os.environ.get("CI") else "here")

FOLDER = Path(__file__).parent
LONGEST = (  # files that take minutes on two cores, the longest first; none of a browser
    "head_atlas/test_build_atlas.py",
    "train/test_distributed.py",
    "compiled/test_jit_cache.py",
    "observe/interception/functions/test_hf_registry.py",
    "recipes/test_lectures.py",
    "probe/test_probe_heads.py",
    "train/test_kill.py",
    "examination/test_right.py",
    "cli/test_examine.py",
    "notebooks/test_notebooks.py",
)
assert all((FOLDER / name).is_file() for name in LONGEST), "a file of LONGEST was renamed or removed"


STARTED = float(os.environ.setdefault("REGARD_TESTS_STARTED", str(time.time())))  # other processes inherit it
TODAY = datetime.date.fromtimestamp(STARTED).toordinal()  # the same in all processes, though midnight passes
MANY_CASES = 5
LEFT_OUT = "left out today, since the run had taken long"
places_of_cases: dict[pytest.Item, tuple[int, int]] = {}  # among the cases of its test, which has many, and their number


def number_cases(items: list[pytest.Item]) -> None:
    """Fill `places_of_cases`."""
    cases = defaultdict(list)
    for item in items:
        test, _, case = item.name.partition("[")
        if case:
            cases[item.path, test].append(item)
    for many in cases.values():
        if len(many) >= MANY_CASES:
            places_of_cases.update((item, (place, len(many))) for place, item in enumerate(many))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests of a run that takes long, others each day.

    Each time that MINUTES have passed, a third is left of the cases of a test with many; one MINUTES later likewise of slow
    tests with few cases, and two later of all others.
    """
    stage = int((time.time() - STARTED) / 60 / MINUTES)
    if item in places_of_cases:
        place, count = places_of_cases[item]
        parts = min(3**stage, count)
    else:
        place = zlib.crc32(item.nodeid.encode())
        parts = 3 ** max(0, stage - (1 if item.get_closest_marker("slow") else 2))
    if (place + TODAY) % parts:
        pytest.skip(LEFT_OUT)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many tests were left out."""
    if count := sum(LEFT_OUT in str(report.longrepr) for report in terminalreporter.stats.get("skipped", ())):
        terminalreporter.write_line(
            f"The run took more than {MINUTES:g} minutes: {count} tests were left out from then on, others each day. "
            "All of them: make test-all"
        )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the longest files first, so that no process works alone at the end, and those of a browser last.

    A browser's event loop stays in its process, where no test could start another. Files between begin elsewhere each day.
    """
    in_browser = {item.path: None for item in items if "browser" in getattr(item, "fixturenames", ())}
    longest = {FOLDER / name: None for name in LONGEST}
    others = [path for path in dict.fromkeys(item.path for item in items) if path not in in_browser | longest]
    first = TODAY * 97 % len(others) if others else 0  # 97 files further each day
    places = {path: place for place, path in enumerate([*longest, *others[first:], *others[:first], *in_browser])}
    items.sort(key=lambda item: places[item.path])
    number_cases(items)


@pytest.fixture
def screen_of_80_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


if together := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):  # before torch is imported, here and in processes that tests begin
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // int(together))))

DRIVERS = ("/proc/driver/nvidia", "/dev/dxg", "/dev/kfd")  # NVIDIA's, that of Windows' Linux, AMD's
if not any(map(os.path.exists, DRIVERS)):  # before triton is imported: its kernels are interpreted without a GPU
    os.environ.setdefault("TRITON_INTERPRET", "1")

if os.environ.get("REGARD_TESTS_WITHOUT_OPENMP"):  # see processors.py
    from regard.compiled import threads

    threads.find_torch_symbol = lambda name: None
