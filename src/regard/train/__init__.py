"""Training a GPT-2 from its first weight: a config, a loop that yields a report a step, and who listens to it."""

from regard.train.config import TrainConfig
from regard.train.loop import Listener, follow, loop, run
from regard.train.report import Report
from regard.train.training import Training, begin

__all__ = ["Listener", "Report", "TrainConfig", "Training", "begin", "follow", "loop", "run"]
