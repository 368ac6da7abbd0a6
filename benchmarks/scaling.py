"""Training by one process of two threads, and by two of one thread each that exchange by gloo: the command itself, by torchrun.

Equal are the losses, step after step, within what the order of a sum may change. The batch is the same for all: two
processes have half of its rows each.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.tables import Table
from regard.text import BytePair
from regard.text.corpus import prepare

TITLE = "Training by several processes: tokens a second, 6 layers of 384, batch 8 x 256, float32"
COLUMNS = ["processes", "threads of each", "engine", "step ms", "tokens a second", "loss off"]
RUNS = ((1, 2, "ddp"), (2, 1, "ddp"), (2, 1, "fsdp"))  # of one process the engine is not used
STEPS, WARM = 16, 4
BATCH, CONTEXT, VOCABULARY = 8, 256, 4096
TURNS = 2
CONFIG = f"""
corpus = "{{corpus}}"
out = "{{out}}"
engine = "{{engine}}"
held_out = 0.0
steps = {STEPS}
batch = {BATCH}
warmup = 2
evaluate_every = 0
checkpoint_every = 0
peak_tflops = 1.0
[model]
layers = 6
heads = 6
width = 384
context = {CONTEXT}
"""


def run(peak: dict[torch.dtype, float]) -> Table:
    """A row for each way."""
    table = Table(TITLE, COLUMNS)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_corpus(root)
        logs = [[run_training(root, *one, turn) for turn in range(TURNS)] for one in RUNS]
    first = [row["loss_nats"] for row in logs[0][0]]
    for (processes, threads, engine), turns in zip(RUNS, logs, strict=True):
        off = max(abs(row["loss_nats"] - loss) for row, loss in zip(turns[0], first, strict=True))
        assert off < 1e-4, f"{processes} processes by {engine} learn something else: {off:.1e}"
        seconds = statistics.median(row["seconds"] for log in turns for row in log[WARM:])
        name = engine if processes > 1 else "none"
        table.add(processes, threads, name, seconds * 1e3, BATCH * CONTEXT / seconds, off)
    return table


def write_corpus(root: Path) -> None:
    """Random numbers as words, as many as the steps need."""
    dice = torch.Generator().manual_seed(0)
    words = " ".join(map(str, torch.randint(0, 10**6, (BATCH * CONTEXT * STEPS,), generator=dice).tolist()))
    prepare([words], BytePair.train([words], VOCABULARY), root / "corpus", workers=1)


def run_training(root: Path, processes: int, threads: int, engine: str, turn: int) -> list[dict]:
    """The log of a run of the command."""
    out = root / f"{engine}-{processes}-{turn}"
    (root / "config.toml").write_text(CONFIG.format(corpus=root / "corpus", out=out, engine=engine))
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    command = [sys.executable, *torchrun, "-m", "regard", "train", "--config", root / "config.toml"]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "GLOO_SOCKET_IFNAME": "lo"}
    subprocess.run(command, env=environment, check=True, capture_output=True)
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
