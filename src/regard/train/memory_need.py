"""The least memory that a run needs, counted before anything is allocated; a run that cannot fit into memory is refused."""

import os
from dataclasses import replace

import torch

from regard.errors import ConfigError
from regard.train.config import TrainConfig
from regard.train.single_process import Engine
from regard.train.translator_sizes import TranslatorSizes

BYTES_PER_PARAMETER = 16  # bytes per parameter: weight, gradient and two moments
BYTES_PER_TOKEN = 3 * 8  # bytes per token of a batch: token, target and document
ADDRESS_SPACE = 1 << 47  # bytes that a process can address, if the size of the memory is unknown


def check_memory(config: TrainConfig, engine: Engine, *, vocabulary: int = 1) -> None:
    """Raise ConfigError, with the bytes, for a run that needs more memory than there is; vocabulary is 1 if not known yet."""
    parts = count_needed_bytes(config, engine.world, vocabulary)
    total, limit = sum(parts.values()), get_memory_limit(engine)
    if total > limit:
        listing = ", ".join(f"{name} {number:,}" for name, number in parts.items())
        raise ConfigError(
            f"these settings need at least {total:,} bytes of memory ({listing}), and there are {limit:,}. Choose a smaller "
            f"batch or model; regard train --plan counts what each takes."
        )


def count_needed_bytes(config: TrainConfig, world: int, vocabulary: int) -> dict[str, int]:
    """Return the least number of bytes that each of `world` processes needs, by purpose.

    Of activations, only the residual stream between blocks and the logits are counted.
    """
    if isinstance(config.model, TranslatorSizes):
        return {"model": BYTES_PER_PARAMETER * config.model.count_parameters() // (world if config.engine == "fsdp" else 1)}
    sizes = replace(config.model, vocabulary=vocabulary)
    tokens = -(-config.batch // world) * sizes.context
    half = config.precision == "bfloat16"
    return {
        "model": BYTES_PER_PARAMETER * sizes.parameters // (world if config.engine == "fsdp" else 1),
        "batches": BYTES_PER_TOKEN * tokens * config.accumulate,
        "activations": (2 if half else 4) * tokens * (sizes.layers * sizes.width + vocabulary),
    }


def get_memory_limit(engine: Engine) -> int:
    """Return the most memory, including swap, that each process of this machine can have, in bytes."""
    if engine.device.type == "cuda":
        return int(torch.cuda.get_device_properties(engine.device).total_memory)
    local_world = os.environ.get("LOCAL_WORLD_SIZE", "") if engine.world > 1 else ""
    return read_memory_size() // (int(local_world) if local_world.isdecimal() and int(local_world) else 1)


def read_memory_size() -> int:
    """Return the bytes of this machine's memory and swap."""
    try:
        found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        return ADDRESS_SPACE
    try:
        with open("/proc/meminfo", encoding="utf-8") as lines:
            swap = [int(line.split()[1]) * 1024 for line in lines if line.startswith("SwapTotal:")]
    except (OSError, ValueError, IndexError):
        swap = []
    return found + sum(swap) if found > 0 else ADDRESS_SPACE
