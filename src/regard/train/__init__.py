"""Train a GPT-2 or a translator from scratch: a config, a loop that yields a report per step, and listeners."""

from regard.train.config import TrainConfig
from regard.train.training_loop import Listener, follow, loop, run
from regard.train.training_state import Report, Training, begin

__all__ = ["Listener", "Report", "TrainConfig", "Training", "begin", "follow", "loop", "run"]
