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
from regard.train.checkpoint_header import HEADER_NAME, are_finite, is_count, make_damage_error
from regard.train.checkpoints import TrainingCheckpoint
from regard.train.config import TrainConfig, refuse_different_run
from regard.train.loss import RunningLoss
from regard.train.prepared_data import read_config
from regard.train.single_process import Engine

# what the last bits depend on
REPRODUCIBILITY_KEYS = ("torch", "numba", "processor", "device", "threads", "processes", "engine", "compile")


def resume_training(training: Any) -> None:
    """Restore the state of a Training from its last checkpoint; do nothing if there is none.

    Raises ConfigError for a config that would change the results of the run, DataError for a checkpoint that is not what was
    written.
    """
    config, last = training.config, training.checkpoints.read_latest()
    if last is None:
        return
    running = check_header(last.folder / HEADER_NAME, last.header)
    refuse_different_run(read_config(last.folder, last.header), config, training.folder)
    if last.header["corpus"] != training.task.identify_data():
        raise ConfigError(
            f"the corpus is not the one that the run in {training.folder} was trained on. Use that one, or name another folder "
            "as out."
        )
    if last.step > config.steps:
        raise ConfigError(f"steps is {config.steps}, and the run in {training.folder} has done {last.step}: use more steps.")
    training.running, training.best, training.held_out_nats = running, last.header["best"], last.header["held_out_nats"]
    training.step = training.resumed = last.step
    restore_models(training, last)
    now, before = describe_computer(config, training.engine), last.header.get("computed_by", {})
    training.changes = [f"{name} {now.get(name)} instead of {was}" for name, was in before.items() if now.get(name) != was]


def restore_models(training: Any, last: TrainingCheckpoint) -> None:
    """Load the last checkpoint, and write its models again: those in the folder may be altered, or of a later step."""
    best, is_last = training.checkpoints.read_best(), last.step == training.config.steps
    best = best if best is not None and best.header["held_out_nats"] == training.best else None
    if best is not None:
        checkpoints.restore_checkpoint(best, training.wrapped_model, training.optimizer)
        training.save_model("model")
    if best is None or best.step != last.step:
        checkpoints.restore_checkpoint(last, training.wrapped_model, training.optimizer)
        if is_last:
            training.save_model("last" if training.held_out is not None else "model")


def check_header(path: Path, says: Mapping[str, Any]) -> RunningLoss:
    """Return the running loss in run.json; raise DataError if a value that a run needs is missing or invalid."""
    running = says.get("running")
    expected = {"mean", "variance", "count", "skipped"}
    if not isinstance(running, dict) or running.keys() != expected or not are_finite(running.values()):
        raise make_damage_error(path, f"running must be the numbers {', '.join(sorted(expected))}; got {running!r}")
    if running["variance"] < 0 or not is_count(running["count"]) or not is_count(running["skipped"]):
        raise make_damage_error(path, f"running must be numbers of at least 0; got {running!r}")
    if says.get("best") is not None and not are_finite([says["best"]]):
        raise make_damage_error(path, f"best must be a number; got {says['best']!r}")
    for name in ("config", "corpus"):
        if not isinstance(says.get(name), dict):
            raise make_damage_error(path, f"{name} must be an object; got {says.get(name)!r}")
    computed = says.get("computed_by", {})
    if not isinstance(computed, dict) or not all(isinstance(one, str) for one in computed.values()):
        raise make_damage_error(path, f"computed_by must be an object of strings; got {computed!r}")
    if "held_out_nats" not in says:
        raise make_damage_error(path, "it has no held_out_nats")
    return RunningLoss(**running)


def describe_computer(config: TrainConfig, engine: Engine) -> dict[str, str]:
    """Return what the bits of a run depend on besides its config: equal values give equal bits."""
    cpu = engine.device.type == "cpu"
    found = read_versions() | {
        "processor": processor.read_processor_name() or platform.machine(),
        "device": "cpu" if cpu else torch.cuda.get_device_name(engine.device),
        "threads": str(torch.get_num_threads()),
        "processes": str(engine.world),
        "engine": config.engine if engine.world > 1 else "one process",
        "compile": str(config.compile),
    }
    return {name: found[name] for name in REPRODUCIBILITY_KEYS if name in found}
