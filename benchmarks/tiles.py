"""Tiles of sums of 4 and of 8 rows on this processor: causal attention, 12 heads of 64, float32, each height in a process.

Equal are the contexts and the picture, within the rounding of float32. Each process compiles its kernels first, which is not
timed.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.tables import Table
from benchmarks.timing import time_contenders

TITLE = "Tiles of sums of 4 and of 8 rows, two registers wide: causal, 12 heads of 64, float32"
COLUMNS = ["what", "4 rows ms", "8 rows ms", "8 rows / 4 rows"]
LENGTHS = (512, 2048, 8192)
HEIGHTS = (4, 8)
BOUND = 1e-5  # of contexts and weights, all below 5 in size
PROCESS = """
import sys
from regard.compiled import kernel_choice
rows, path = int(sys.argv[1]), sys.argv[2]
kernel_choice.choose_tile_rows = lambda: rows
from benchmarks import tiles
tiles.measure(path)
"""


def run(peak: dict[torch.dtype, float]) -> Table:
    """A row for each length, and one for the overview of one head."""
    table = Table(TITLE, COLUMNS)
    with tempfile.TemporaryDirectory() as folder:
        found = []
        for rows in HEIGHTS:
            path = Path(folder) / f"{rows}.pt"
            environment = {**os.environ, "NUMBA_CACHE_DIR": f"{folder}/{rows}"}
            subprocess.run([sys.executable, "-c", PROCESS, str(rows), str(path)], env=environment, check=True)
            found.append(torch.load(path))
    for name, (milliseconds, result) in found[0].items():
        others, again = found[1][name]
        assert (result - again).abs().max() < BOUND, name
        table.add(name, milliseconds, others, others / milliseconds)
    return table


def measure(path: str) -> None:
    """Write the milliseconds and the result of each row, with the tiles that this process has."""
    from regard import Causal, attention
    from regard.map import AttentionMap

    torch.manual_seed(0)
    ways = {}
    for t in LENGTHS:
        q, k, v = torch.randn(3, 1, 12, t, 64)
        ways[f"attention, {t:,} tokens"] = lambda q=q, k=k, v=v: attention(q, k, v, Causal())
    q, k = torch.randn(2, 1, 1, 4096, 64)
    ways["overview of one head, 4,096 tokens"] = lambda: AttentionMap(q, k, Causal()).overview().mean[0, 0].double()
    torch.save({name: (time_contenders({name: way}, 0).medians[name], way()) for name, way in ways.items()}, path)
