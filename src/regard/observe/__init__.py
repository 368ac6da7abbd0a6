"""Observation of unmodified models: record their attention maps, classify heads, compare recordings, and intervene."""

from regard.observe.files.deserialize import load
from regard.observe.record import record
from regard.observe.recorded_runs.run import Call, Run
from regard.observe.recording import Recording

__all__ = ["Call", "Recording", "Run", "load", "record"]
