"""An atlas by Ray, whose workers are killed once: python kill_workers.py FOLDER MODEL TEXTS. Prints how many were killed.

Exit code 3, and why, if Ray does not start on this machine.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import ray
import torch

from head_atlas.small_atlas import SETTINGS
from regard import atlas
from regard.models import GPT2


def find_workers(session: str) -> list[int]:
    """The workers of a session of Ray: those children of its raylet that compute, or wait to."""

    def search(*arguments: str) -> list[int]:
        found = subprocess.run(["pgrep", *arguments], capture_output=True, text=True, check=False)
        return [int(number) for number in found.stdout.split()]

    children = [child for raylet in search("-f", f"raylet/raylet .*{session}") for child in search("-P", str(raylet))]
    names = b"ray::compute_shard", b"ray::IDLE"
    return [child for child in children if Path(f"/proc/{child}/cmdline").read_bytes().startswith(names)]


def main() -> int:
    torch.set_num_threads(1)
    try:
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    except Exception as error:
        print(f"Ray does not start on this machine: {error}")
        return 3
    killed: list[int] = []

    def kill_workers_once(shards: Iterable[int], count: int) -> Iterator[int]:
        for shard in shards:
            yield shard
            if not killed:
                killed.extend(find_workers(ray.get_runtime_context().get_session_name()))
                for number in killed:
                    os.kill(number, signal.SIGKILL)

    model = GPT2.load(sys.argv[2])
    assert atlas(model, Path(sys.argv[3]), sys.argv[1], **SETTINGS, engine="ray", watch=kill_workers_once) is not None
    ray.shutdown()
    print(len(killed))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
