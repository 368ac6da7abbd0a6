"""The bytes that a run needs at least, counted before anything is made: what this machine cannot hold is refused."""

import os
from dataclasses import replace

import torch

from regard.errors import ConfigError
from regard.train.alone import Engine
from regard.train.config import TrainConfig
from regard.train.sizes import TranslatorSizes

LEARNING = 16  # bytes of a parameter: itself, its gradient and two moments
NUMBERS = 3 * 8  # bytes of a token in a batch: itself, its target, its document
ADDRESSES = 1 << 47  # bytes that a process can address, where the system does not say what it has


def refuse_more_than_there_is(config: TrainConfig, engine: Engine, *, vocabulary: int = 1) -> None:
    """Raise ConfigError, with the bytes, for a run that needs more memory than there is; vocabulary as far as it is known."""
    parts = count_bytes(config, engine.world, vocabulary)
    together, limit = sum(parts.values()), memory_bytes(engine)
    if together > limit:
        listed = ", ".join(f"{name} {number:,}" for name, number in parts.items())
        raise ConfigError(
            f"these settings need at least {together:,} bytes of memory ({listed}), and there are {limit:,}. Choose a smaller "
            f"batch or model; regard train --plan counts what each takes."
        )


def count_bytes(config: TrainConfig, world: int, vocabulary: int) -> dict[str, int]:
    """Return the bytes that each of `world` processes needs at least, by what they are for.

    Of activations, only the stream between blocks and the logits are counted.
    """
    if isinstance(config.model, TranslatorSizes):
        return {"model": LEARNING * config.model.count_parameters() // (world if config.engine == "fsdp" else 1)}
    sizes = replace(config.model, vocabulary=vocabulary)
    tokens = -(-config.batch // world) * sizes.context
    half = config.precision == "bfloat16"
    return {
        "model": LEARNING * sizes.parameters // (world if config.engine == "fsdp" else 1),
        "batches": NUMBERS * tokens * config.accumulate,
        "activations": (2 if half else 4) * tokens * (sizes.layers * sizes.width + vocabulary),
    }


def memory_bytes(engine: Engine) -> int:
    """Return the bytes of memory, and of swap, that each process of this machine can have at most."""
    if engine.device.type == "cuda":
        return int(torch.cuda.get_device_properties(engine.device).total_memory)
    here = os.environ.get("LOCAL_WORLD_SIZE", "") if engine.world > 1 else ""
    return read_memory() // (int(here) if here.isdecimal() and int(here) else 1)


def read_memory() -> int:
    """Return the bytes of this machine's memory and swap."""
    try:
        found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        return ADDRESSES
    try:
        with open("/proc/meminfo", encoding="utf-8") as lines:
            swap = [int(line.split()[1]) * 1024 for line in lines if line.startswith("SwapTotal:")]
    except (OSError, ValueError, IndexError):
        swap = []
    return found + sum(swap) if found > 0 else ADDRESSES
