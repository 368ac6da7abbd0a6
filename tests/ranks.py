"""Scripts that run in two processes of a process group on this machine."""

import os
import socket
import subprocess
import sys
from pathlib import Path

RANKS = 2


def run_ranks(script: Path, *arguments: object) -> list[str]:
    """Run a script with some arguments in each process of a group; return what each printed. Fails if one of them does."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(RANKS):
        place = {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        environment = {**os.environ, **place, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, script, *map(str, arguments)]
        processes.append(subprocess.Popen(command, env=environment, stdout=-1, stderr=subprocess.STDOUT, text=True))
    printed = [process.communicate(timeout=600)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * RANKS, "\n".join(printed)
    return printed
