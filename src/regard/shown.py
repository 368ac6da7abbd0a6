"""Values that a notebook shows as pictures: they ask whoever draws, a room above theirs that the door names."""

from importlib import import_module
from typing import ClassVar


class Shown:
    """A value that shows itself where a notebook's cell ends with it.

    `by` is the module that draws, imported when it is first asked; its html(value) gives None where text must do.
    """

    by: ClassVar[str | None] = None

    def _repr_html_(self) -> str | None:
        if Shown.by is None:
            return None
        try:
            drawn: str | None = import_module(Shown.by).html(self)
        except ImportError:  # what draws is an extra that is not installed
            return None
        return drawn
