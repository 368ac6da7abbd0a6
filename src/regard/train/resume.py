"""Resume a run from its last checkpoint: check the checkpoint, and make the files in the folder agree with it."""

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from regard.compiled import processor
from regard.errors import ConfigError
from regard.machine import read_versions
from regard.train import checkpoints
from regard.train.alone import Engine
from regard.train.checkpoints import Checkpoint
from regard.train.config import TrainConfig, refuse_another_run
from regard.train.divergence import Running
from regard.train.header import NAME, are_finite, damage_error, is_count
from regard.train.prepared import read_config

BITS = ("torch", "numba", "processor", "device", "threads", "processes", "engine", "compile")  # what the last bits depend on


def resume(training: Any) -> None:
    """Restore the state of a Training from its last checkpoint; do nothing if there is none.

    Raises ConfigError for a config that would change the results of the run, DataError for a checkpoint that is not what was
    written.
    """
    config, last = training.config, training.checkpoints.latest()
    if last is None:
        return
    running = check_says(last.folder / NAME, last.says)
    refuse_another_run(read_config(last.folder, last.says), config, training.folder)
    if last.says["corpus"] != training.subject.identity():
        raise ConfigError(f"the corpus is not the one that the run in {training.folder} was trained on.")
    if last.step > config.steps:
        raise ConfigError(f"steps is {config.steps}, and the run in {training.folder} has done {last.step}: use more steps.")
    training.running, training.best, training.looked = running, last.says["best"], last.says["held_out_nats"]
    training.step = training.resumed = last.step
    load_and_restore(training, last)
    now, before = describe_computer(config, training.engine), last.says.get("computed_by", {})
    training.changes = [f"{name} {now.get(name)} instead of {was}" for name, was in before.items() if now.get(name) != was]


def load_and_restore(training: Any, last: Checkpoint) -> None:
    """Load the last checkpoint, and write its models again: those in the folder may be altered, or of a later step."""
    best, is_last = training.checkpoints.best(), last.step == training.config.steps
    best = best if best is not None and best.says["held_out_nats"] == training.best else None
    if best is not None:
        checkpoints.load(best, training.called, training.optimiser)
        training.save_model("model")
    if best is None or best.step != last.step:
        checkpoints.load(last, training.called, training.optimiser)
        if is_last:
            training.save_model("last" if training.held_out is not None else "model")


def check_says(path: Path, says: Mapping[str, Any]) -> Running:
    """Return the running loss in run.json; raise DataError if a value that a run needs is missing or invalid."""
    running = says.get("running")
    expected = {"mean", "variance", "count", "skipped"}
    if not isinstance(running, dict) or running.keys() != expected or not are_finite(running.values()):
        raise damage_error(path, f"running must be the numbers {', '.join(sorted(expected))}; got {running!r}")
    if running["variance"] < 0 or not is_count(running["count"]) or not is_count(running["skipped"]):
        raise damage_error(path, f"running must be numbers of at least 0; got {running!r}")
    if says.get("best") is not None and not are_finite([says["best"]]):
        raise damage_error(path, f"best must be a number; got {says['best']!r}")
    for name in ("config", "corpus"):
        if not isinstance(says.get(name), dict):
            raise damage_error(path, f"{name} must be an object; got {says.get(name)!r}")
    computed = says.get("computed_by", {})
    if not isinstance(computed, dict) or not all(isinstance(one, str) for one in computed.values()):
        raise damage_error(path, f"computed_by must be an object of strings; got {computed!r}")
    if "held_out_nats" not in says:
        raise damage_error(path, "it has no held_out_nats")
    return Running(**running)


def describe_computer(config: TrainConfig, engine: Engine) -> dict[str, str]:
    """Return what the bits of a run depend on besides its config: equal values give equal bits."""
    cpu = engine.device.type == "cpu"
    found = read_versions() | {
        "processor": processor.read_name() or platform.machine(),
        "device": "cpu" if cpu else torch.cuda.get_device_name(engine.device),
        "threads": str(torch.get_num_threads()),
        "processes": str(engine.world),
        "engine": config.engine if engine.world > 1 else "one process",
        "compile": str(config.compile),
    }
    return {name: found[name] for name in BITS if name in found}
