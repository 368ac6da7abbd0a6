"""An atlas by Ray, two of whose workers are killed: python kill_workers.py FOLDER MODEL TEXTS. Prints how many were killed.

Exit code 3, and why, if Ray does not start on this machine.
"""

import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch

from head_atlas.small_atlas import SETTINGS
from regard import atlas
from regard.head_atlas.plan import get_shard_path
from regard.models import GPT2

KILLS = 2


def list_marks(folder: Path) -> list[Path]:
    """List the files beside an atlas of which a worker makes one before it is killed."""
    return [folder.with_name(f"{folder.name}-killed-{number}") for number in range(KILLS)]


def kill_worker(folder: Path, model: Any, inputs: Any) -> None:
    """Kill this process, as the system does when memory is short, if a shard is done and too few workers were killed."""
    if any(get_shard_path(folder, 0).parent.glob("*.safetensors")):
        for mark in list_marks(folder):
            try:
                mark.touch(exist_ok=False)
            except FileExistsError:
                continue
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> int:
    torch.set_num_threads(1)
    os.environ.update(RAY_worker_niceness="0")  # not 15, with which a worker beside a full test run imports torch for minutes
    try:
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    except Exception as error:
        print(f"Ray does not start on this machine: {error}")
        return 3
    folder, model = Path(sys.argv[1]), GPT2.load(sys.argv[2])
    model.register_forward_pre_hook(partial(kill_worker, folder))  # in a worker, while it computes a shard
    assert atlas(model, Path(sys.argv[3]), folder, **SETTINGS, engine="ray") is not None
    ray.shutdown()
    print(sum(mark.exists() for mark in list_marks(folder)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
