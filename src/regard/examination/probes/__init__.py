"""What is asked of a case, one property a file: look(case) yields what it found, checked or cannot tell."""

from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec

from regard.examination.case import Case
from regard.examination.report import Checked, Finding, Unknown

Look = Callable[[Case], Iterator[Finding | Checked | Unknown]]

NAMES = (
    *("raises", "blind", "future", "padding", "pattern", "batch", "lengths", "cache"),
    *("weights", "scale", "heads", "roles"),
    *("dropout", "overflow", "precision", "gradient"),
)
PROBES: tuple[tuple[str, Look], ...] = tuple(
    (name, import_module(f"{__name__}.{name}").look) for name in NAMES if find_spec(f"{__name__}.{name}") is not None
)
