"""What saving and loading a recording cost, and how much of it is the checksums: GPT-2's shape, 4,096 tokens.

Equal is what is read: the sum of every tensor of the file. Reading is of a file that the system holds in memory, so that the
figures are those of the processor and not of a disk.
"""

import tempfile
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from benchmarks.recording import gpt2, tokens
from benchmarks.tables import Table
from benchmarks.timing import time_contenders
from regard import Recording, load, record
from regard.observe.files.checksums import compute_checksums

T = 4096
TITLE = f"A recording in a file: GPT-2's shape, {T:,} tokens"
COLUMNS = ["what", "ms", "GB/s"]


def run(peak: dict[torch.dtype, float]) -> Table:
    """A row for each step: medians of runs in turn, and the bytes of the file a second."""
    table = Table(TITLE, COLUMNS)
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        path = Path(folder) / "gpt2.reg"
        with record(model := gpt2()) as recording:
            model(tokens(T))
        recording.save(path)
        tensors = read_tensors(path)
        size = sum(x.numel() * x.element_size() for x in tensors.values())
        ways = {
            "load and read": partial(load_and_read, path, True),
            "load without verification and read": partial(load_and_read, path, False),
        }
        beside = {
            "save": partial(save, recording, Path(folder) / "again.reg"),
            "checksums of all tensors": partial(compute_checksums, tensors),
            "a sum of all bytes, as words of 64 bits": partial(sum_words, tensors),
        }
        medians = time_contenders(ways, 0, beside).medians
    for name, milliseconds in medians.items():
        table.add(name, milliseconds, size / milliseconds / 1e6)
    return table


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of a file, in memory."""
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118


def load_and_read(path: Path, verify: bool) -> Tensor:
    """The sum of all queries and keys of a recording in a file."""
    found = load(path, verify=verify)
    stored = [x for call in found.last.calls for x in (call.stored.q, *call.history.keys)]
    return torch.stack([x.sum(dtype=torch.float64) for x in stored])


def save(recording: Recording, path: Path) -> None:
    recording.save(path)


def sum_words(tensors: dict[str, Tensor]) -> int:
    """Reading and nothing else."""
    return sum(int(x.view(-1).view(torch.int64).sum()) for x in tensors.values() if x.numel() * x.element_size() % 8 == 0)
