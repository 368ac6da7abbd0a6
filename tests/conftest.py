"""Settings for every test: hypothesis without a deadline; each process its share of cores.

hypothesis draws the same 20 examples each time, unless a test says how many it needs, and fewer on an emulated processor
(processors.py). Random numbers begin anew with each test, whatever ran before it in its process. So a commit always runs the
same tests with the same examples. `--shard 2/6` keeps the second of six parts of the files; each file is in one of them.

With `-n 2`, as make runs them, processes take the files of tests in turn and share the threads: a test may
rely on nothing that a test of another file has made, and on no port, folder or moment of its own choice.
"""

import os
import random
import tempfile
import zlib
from pathlib import Path

import pytest
from hypothesis import settings

from run_limits import EMULATED, limit_examples

os.environ["REGARD_CACHE"] = tempfile.mkdtemp(prefix="regard-cache-")  # a test writes into no user's folder
settings.register_profile("everywhere", deadline=None, derandomize=True, print_blob=True, max_examples=20)
settings.register_profile("emulated", settings.get_profile("everywhere"), max_examples=limit_examples(20))
settings.load_profile("emulated" if EMULATED else "everywhere")

FOLDER = Path(__file__).parent
LONGEST = (  # files that take minutes on two cores, the longest first
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
CI_TESTS = (FOLDER / "ci.txt").read_text().split()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", help="run a part of the files, such as 2/6")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave the files of other shards out."""
    if (shard := config.getoption("shard")) and collection_path.suffix == ".py":
        part, count = map(int, shard.split("/"))
        if zlib.crc32(collection_path.relative_to(FOLDER).as_posix().encode()) % count != part % count:
            return True
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of ci.txt; start the longest first, then a browser's, so that no process works alone at the end."""
    for item in items:
        if item.nodeid.partition("[")[0].removeprefix("tests/") in CI_TESTS:
            item.add_marker("ci")
    places = {FOLDER / name: place for place, name in enumerate(LONGEST)}
    for item in items:
        places.setdefault(item.path, len(LONGEST) + ("browser" not in getattr(item, "fixturenames", ())))
    items.sort(key=lambda item: places[item.path])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Seed what the test and the fixtures that are made for it draw."""
    import numpy  # not before the number of threads is set
    import torch

    random.seed(0)
    numpy.random.seed(0)  # noqa: NPY002
    torch.manual_seed(0)


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
