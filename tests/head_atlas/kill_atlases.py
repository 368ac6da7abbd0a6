"""Atlases that are killed: a process that has imported everything forks each of them, which costs no second a run.

python kill_atlases.py FOLDER MODEL TEXTS KILLS. Each run is killed at a random moment; the last is let live. Where a run is
done before it is killed, half of its shards, or its plan, are removed. Prints the number of kills.
"""

import importlib
import os
import random
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch

import regard
from head_atlas.small_atlas import SETTINGS
from regard import atlas
from regard.models import GPT2


def start_run(folder: Path, model: str, texts: Path) -> int:
    """An atlas in a process of its own."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        atlas(GPT2.load(model), texts, folder, **SETTINGS)
        code = 0
    finally:
        sys.stderr.flush()
        os._exit(code)


def is_killed(child: int, seconds: float) -> bool:
    """Whether a run was killed after so many seconds; False where it was done first."""
    begun = time.monotonic()
    while time.monotonic() - begun < seconds:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            assert status == 0, f"the run ended with {status}"
            return False
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True


def main() -> None:
    torch.set_num_threads(1)  # threads do not outlive a fork
    assert regard.record  # what a run imports late is imported here
    for name in ("pandas", "pyarrow.parquet", "sympy"):  # it takes longer than the run
        with suppress(ImportError):  # pandas may be missing
            importlib.import_module(name)
    folder, model, texts, wanted = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
    begun = time.monotonic()
    assert os.waitpid(start_run(folder.with_name("timed"), model, texts), 0)[1] == 0
    whole, dice, kills = time.monotonic() - begun, random.Random(0), 0
    while kills < wanted:
        if is_killed(start_run(folder, model, texts), dice.uniform(0, whole)):
            kills += 1
            continue
        files = [folder / "atlas.json", *sorted((folder / "shards").glob("*.safetensors"))]  # a hidden folder may be left
        for path in dice.sample(files, len(files) // 2):
            path.unlink()
    assert os.waitpid(start_run(folder, model, texts), 0)[1] == 0
    print(kills)


if __name__ == "__main__":
    main()
