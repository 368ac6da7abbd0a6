"""Random numbers of a step, made from its number alone: a run that goes on needs no luck."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def seed_of(seed: int, step: int, rank: int = 0) -> int:
    """A seed for a step of a process."""
    digest = hashlib.blake2b(f"{seed} {step} {rank}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@contextmanager
def seeded(seed: int, step: int, rank: int, device: torch.device) -> Iterator[None]:
    """A context in which torch's generators stand where this step's begin; before and after it they are the caller's."""
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        torch.manual_seed(seed_of(seed, step, rank))
        yield
