"""Values that a notebook shows as pictures, drawn by a module of a higher layer."""

from importlib import import_module
from typing import ClassVar


class HtmlRepr:
    """Mixin for a value that a notebook displays as HTML.

    `by` is the module that draws, imported on first use; its html(value) returns None to fall back to text.
    """

    renderer: ClassVar[str | None] = None

    def _repr_html_(self) -> str | None:
        if HtmlRepr.renderer is None:
            return None
        try:
            html: str | None = import_module(HtmlRepr.renderer).render_html(self)
        except ImportError:  # the drawing module needs an extra that is not installed
            return None
        return html
