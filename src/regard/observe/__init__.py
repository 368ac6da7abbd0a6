"""What a model looks at while it runs: recorded, typed, compared and changed, in any model, unmodified."""

from regard.observe.record import record
from regard.observe.recording import Call, Recording, Run
from regard.observe.unpacking import load

__all__ = ["Call", "Recording", "Run", "load", "record"]
