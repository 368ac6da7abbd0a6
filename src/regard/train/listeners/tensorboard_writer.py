"""Curves of a run in TensorBoard, if it is installed."""

import importlib.util
from pathlib import Path
from typing import Any

from regard.errors import ConfigError
from regard.train.training_loop import is_due
from regard.train.training_state import Report, Training

CURVES = {"loss_nats": "loss/trained on", "held_out_nats": "loss/held out", "rate": "rate", "gradient_norm": "gradient norm"}
FLUSH_STEPS = 100  # steps between two flushes


def is_tensorboard_installed() -> bool:
    """Return whether TensorBoard is installed."""
    return importlib.util.find_spec("tensorboard") is not None


class TensorBoardWriter:
    """A listener that writes every report into a folder for `tensorboard --logdir`; repeated steps replace the old ones."""

    def __init__(self, folder: Path) -> None:
        if not is_tensorboard_installed():
            raise ConfigError("TensorBoard is not installed: pip install tensorboard.")
        self.folder = folder
        self._writer: Any = None

    def __call__(self, training: Training, report: Report) -> None:
        if not training.is_first_process:
            return
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(self.folder, purge_step=report.step)
        for field, curve in CURVES.items():
            value = getattr(report, field)
            if value is not None:
                self._writer.add_scalar(curve, value, report.step)
        if report.sample is not None:
            self._writer.add_text("sample", report.sample, report.step)
        if is_due(FLUSH_STEPS, report.step) or training.stopped or report.step == training.config.steps:
            self._writer.flush()
