"""What a command waits for before its first token: `regard generate` with the pocket model, in processes of its own.

Equal are the words that are printed. The first process finds an empty cache of compiled loops, the following ones what it
left there; a process that only imports torch is the yardstick. Python's own bytecode is on disk for all.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.tables import Table

TITLE = "From the command to its first token: regard generate, model pocket, seconds"
COLUMNS = ["process", "first word s", "whole process s", "files of compiled loops written"]
TURNS = 5
GENERATE = ["-m", "regard", "generate", "Lily had a red ball and", "--tokens", "8", "--temperature", "0"]
TORCH = ["-c", "import torch; print(torch.__version__)"]


def run(peak: dict[torch.dtype, float]) -> Table:
    """A row for the first process ever, for those after it, and for an import of torch; the three in turn."""
    table = Table(TITLE, COLUMNS)
    with tempfile.TemporaryDirectory() as folder:
        measure(GENERATE, folder)
    found: dict[str, list[tuple[float, float, int]]] = {"first ever": [], "a later one": [], "import torch": []}
    texts = set()
    for _ in range(TURNS):
        with tempfile.TemporaryDirectory() as folder:
            for name, command in (("first ever", GENERATE), ("a later one", GENERATE), ("import torch", TORCH)):
                before = count_files(Path(folder))
                first, whole, text = measure(command, folder)
                found[name].append((first, whole, count_files(Path(folder)) - before))
                if command is GENERATE:
                    texts.add(text)
    assert len(texts) == 1, f"not the same words: {texts}"
    for name, rows in found.items():
        table.add(name, *(statistics.median(row[column] for row in rows) for column in (0, 1)), max(row[2] for row in rows))
    return table


def measure(command: list[str], cache: str) -> tuple[float, float, str]:
    """Seconds until the first byte of the output and until the end, and the output."""
    start = time.perf_counter()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["NUMBA_CACHE_DIR"] = cache
    with subprocess.Popen([sys.executable, *command], env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        text = process.stdout.read(1)
        first = time.perf_counter() - start
        text += process.stdout.read()
    assert process.returncode == 0, text
    return first, time.perf_counter() - start, text.decode()


def count_files(folder: Path) -> int:
    return sum(path.is_file() for path in folder.rglob("*"))
