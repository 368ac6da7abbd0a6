"""Observation of unmodified models: record their attention maps, classify heads, compare recordings, and intervene."""

from regard.observe.deserialize import load
from regard.observe.record import record
from regard.observe.recording import Recording
from regard.observe.run import Call, Run

__all__ = ["Call", "Recording", "Run", "load", "record"]
