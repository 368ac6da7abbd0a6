"""Observation of unmodified models: record their attention maps, classify heads, compare recordings, and intervene."""

from regard.observe.record import record
from regard.observe.recording import Call, Recording, Run
from regard.observe.unpacking import load

__all__ = ["Call", "Recording", "Run", "load", "record"]
