"""Values that a notebook shows as pictures, drawn by a module of a higher layer."""

from importlib import import_module
from typing import ClassVar


class Shown:
    """Mixin for a value that a notebook displays as HTML.

    `by` is the module that draws, imported on first use; its html(value) returns None to fall back to text.
    """

    by: ClassVar[str | None] = None

    def _repr_html_(self) -> str | None:
        if Shown.by is None:
            return None
        try:
            drawn: str | None = import_module(Shown.by).html(self)
        except ImportError:  # the drawing module needs an extra that is not installed
            return None
        return drawn
