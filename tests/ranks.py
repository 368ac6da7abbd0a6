"""The processes of a process group on this machine: their environment, and scripts that run in two of them."""

import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

RANKS = 2


def run_ranks(script: Path, *arguments: object) -> list[str]:
    """Run a script with some arguments in each process of a group; return what each printed. Fails if one of them does."""
    (port,) = find_free_ports(1)
    processes = []
    for rank in range(RANKS):
        environment = {**os.environ, **describe_rank(rank, port, RANKS), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, script, *map(str, arguments)]
        processes.append(subprocess.Popen(command, env=environment, stdout=-1, stderr=subprocess.STDOUT, text=True))
    printed = [process.communicate(timeout=600)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * RANKS, "\n".join(printed)
    return printed


def describe_rank(rank: int, port: int, world: int = 2) -> dict[str, str]:
    """Return the environment variables that torchrun sets, and gloo's."""
    said = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {**{name: str(value) for name, value in said.items()}, "GLOO_SOCKET_IFNAME": "lo"}


def find_free_ports(count: int) -> list[int]:
    """Return `count` ports on which nothing listens."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
