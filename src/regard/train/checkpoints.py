"""Checkpoints: tensors by torch.distributed.checkpoint, and the state of the run beside them; each is complete or absent.

    folder/step-00000200/   .metadata, *.distcp: the tensors          run.json: step, config, ..., and a checksum of each file

A thread writes a checkpoint into a hidden folder, from a copy that is made at once; the folder is renamed when all of it is on
disk. `run.json` is written last, so that a folder without it is not a checkpoint.
"""

import math
import os
import shutil
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn

from regard.errors import DataError
from regard.train.checkpoint_header import (
    check_metadata,
    list_checkpoint_folders,
    make_folder_name,
    read_header,
    verify_checkpoint_files,
    write_header,
)

State = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class TrainingCheckpoint:
    """A checkpoint on disk: its folder, and the content of its run.json."""

    folder: Path
    header: Mapping[str, Any]

    @property
    def step(self) -> int:
        """The number of completed steps."""
        return int(self.header["step"])


class CheckpointManager:
    """The checkpoints of a run, of which the last `keep` and the best are kept."""

    def __init__(self, folder: Path, keep: int, *, first: bool = True) -> None:
        self.folder, self.keep, self.first = folder, keep, first
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        # for the thread, apart from training's own
        self._apart = None if is_single_process() else distributed.new_group(backend="gloo")
        if first and folder.is_dir():
            for half in [*folder.glob(".step-*"), *folder.glob(".old-*")]:  # left by a process that was killed
                shutil.rmtree(half)

    def save(self, model: nn.Module, optimiser: torch.optim.Optimizer, says: Mapping[str, Any]) -> None:
        """Start writing a checkpoint; when this returns the weights may change. Waits for the previous checkpoint first."""
        self.wait()
        aside = self.folder / f".{make_folder_name(says['step'])}"
        self.folder.mkdir(parents=True, exist_ok=True)
        writing = start_writing_tensors(select_tensors(get_training_state(model, optimiser)), aside, self._apart)
        self._writing = self._thread.submit(self.finish_saving, writing, aside, dict(says))

    def finish_saving(self, writing: "Future[Any]", aside: Path, says: dict[str, Any]) -> None:
        """Rename a checkpoint when it is on disk, and remove those that need not be kept."""
        try:
            wait_for_tensors(writing)
            if not self.first:
                return
            write_header(aside, says)
            flush_folder(aside)
            os.replace(aside, self.folder / aside.name.removeprefix("."))
            flush_folder(self.folder)
            self.prune()
        except OSError as error:
            shutil.rmtree(aside, ignore_errors=True)  # the disk may be full
            raise DataError(
                f"the checkpoint of step {says['step']} could not be written: {describe_error(error)}. {self.describe_last()}"
            ) from error

    def prune(self) -> None:
        """Remove all checkpoints but the last ones and the best."""
        found = self.read_all()
        best = find_best(found)
        for one in found[: -self.keep]:
            if one is not best:
                hidden = one.folder.with_name(f".old-{one.folder.name}")
                os.replace(one.folder, hidden)  # a half deleted folder must not look like a checkpoint
                shutil.rmtree(hidden)

    def describe_last(self) -> str:
        """Describe the checkpoint that the run can be resumed from, in a sentence."""
        folders = list_checkpoint_folders(self.folder)
        return f"The last one, {folders[-1]}, is complete." if folders else "There is none yet."

    def check_last_save(self) -> None:
        """Raise DataError if the last checkpoint could not be written; do not wait for one that is being written."""
        if self._writing is not None and self._writing.done():
            self.wait()

    def wait(self) -> None:
        """Wait until the last checkpoint is on disk; raise DataError if it could not be written."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def close(self) -> None:
        """Wait for the last checkpoint, ignoring its errors, and end the thread."""
        with suppress(DataError):
            self.wait()
        self._thread.shutdown()

    def read_all(self) -> list[TrainingCheckpoint]:
        """Return the checkpoints on disk, the oldest first."""
        return [TrainingCheckpoint(path, read_header(path)) for path in list_checkpoint_folders(self.folder)]

    def read_latest(self) -> TrainingCheckpoint | None:
        """Return the newest checkpoint; raise DataError if it is not what was written."""
        folders = list_checkpoint_folders(self.folder)
        return verify_checkpoint(folders[-1], folders[-2] if len(folders) > 1 else None) if folders else None

    def read_best(self) -> TrainingCheckpoint | None:
        """Return the checkpoint with the lowest held-out loss; raise DataError if it is not what was written."""
        found = find_best(self.read_all())
        return None if found is None else verify_checkpoint(found.folder, None)


def verify_checkpoint(folder: Path, former: Path | None) -> TrainingCheckpoint:
    """Return the checkpoint in a folder after checking every file; former is the checkpoint before it."""
    says = read_header(folder)
    verify_checkpoint_files(folder, says, former)
    return TrainingCheckpoint(folder, says)


def find_best(checkpoints: Sequence[TrainingCheckpoint]) -> TrainingCheckpoint | None:
    """Return the checkpoint with the lowest held-out loss, the first of equal ones; None if no loss is a finite number."""
    losses = [(one.header.get("held_out_nats"), one) for one in checkpoints]
    finite = [(loss, one) for loss, one in losses if loss is not None and math.isfinite(loss)]
    return min(finite, key=lambda pair: float(pair[0]), default=(None, None))[1]


def start_writing_tensors(tensors: State, aside: Path, group: "distributed.ProcessGroup | None") -> "Future[Any]":
    """Start writing tensors into a folder, from a copy that is made before this returns."""
    # takes half a second, which other commands need not wait for
    from torch.distributed.checkpoint.state_dict_saver import async_save

    writing = async_save(tensors, checkpoint_id=aside, process_group=group, no_dist=group is None)
    assert isinstance(writing, Future)
    return writing


def wait_for_tensors(writing: "Future[Any]") -> None:
    """Wait for tensors that are being written; raise OSError if they could not be."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        writing.result()
    except CheckpointException as error:  # holds the error of each process that failed
        cause = next(iter(error.failures.values()))[0]
        raise OSError(describe_error(cause)) from cause


def restore_checkpoint(checkpoint: TrainingCheckpoint, model: nn.Module, optimiser: torch.optim.Optimizer) -> None:
    """Replace the weights and moments of a model and its optimizer by those of a checkpoint."""
    from torch.distributed.checkpoint import state_dict_loader
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

    check_metadata(checkpoint.folder / ".metadata", checkpoint.header["files"])
    state = get_training_state(model, optimiser)
    tensors = select_tensors(state)
    try:
        state_dict_loader.load(tensors, checkpoint_id=checkpoint.folder, no_dist=is_single_process())
    except (CheckpointException, Exception) as error:  # the first is no Exception; damaged files may raise any other
        cause = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
        raise DataError(f"{checkpoint.folder} is not a checkpoint of this model: {describe_error(cause)}.") from None
    for part, found in tensors.items():
        state[part] |= found
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    set_state_dict(model, optimiser, model_state_dict=state["model"], optim_state_dict=state["optimiser"], options=options)


def get_training_state(model: nn.Module, optimiser: torch.optim.Optimizer) -> State:
    """Return the weights and the optimizer's moments by parameter name, independent of parameter groups and processes.

    The tensors are those that training changes, not copies.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    weights, moments = get_state_dict(model, optimiser, options=StateDictOptions(flatten_optimizer_state_dict=True))
    return {"model": dict(weights), "optimiser": dict(moments)}


def select_tensors(state: State) -> State:
    """Return only the tensors: an optimizer's other state is in the config, and would be pickled."""
    return {part: {key: x for key, x in entries.items() if isinstance(x, Tensor)} for part, entries in state.items()}


def initialize_moments(model: nn.Module, optimiser: torch.optim.Optimizer) -> None:
    """Create an optimizer's moments, all 0, as its first step would: before that, nothing could be stored or loaded."""
    get_training_state(model, optimiser)  # takes a step with a learning rate of 0
    for moments in optimiser.state.values():
        for x in moments.values():
            x.zero_()


def is_single_process() -> bool:
    """Return whether this is the only process; suppress torch's warning about it at every checkpoint, in any thread."""
    warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning)
    return not distributed.is_initialized()


def flush_folder(folder: Path) -> None:
    """Flush the names in a folder to disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def describe_error(error: BaseException) -> str:
    """Return an error's message in one line; the operating system's message if an OSError caused it, such as a full disk."""
    behind: BaseException | None = error
    while behind is not None and not (isinstance(behind, OSError) and behind.errno):
        behind = behind.__cause__ or behind.__context__
    if isinstance(behind, OSError) and behind.strerror:
        return behind.strerror
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__
