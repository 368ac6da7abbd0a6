"""Random numbers of a step, derived from the step's number alone, so that a resumed run draws the same ones."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def derive_seed(seed: int, step: int, rank: int = 0) -> int:
    """Derive the seed for a step of a process."""
    digest = hashlib.blake2b(f"{seed} {step} {rank}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@contextmanager
def seed_generators(seed: int, step: int, rank: int, device: torch.device) -> Iterator[None]:
    """Seed torch's generators for a step within the context, and restore the caller's generator states after it."""
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        torch.manual_seed(derive_seed(seed, step, rank))
        yield
