"""Values that a notebook shows as pictures, drawn by a module of a higher layer."""

from importlib import import_module

TYPE_CHECKING = False  # as in typing, whose import takes as long as Python's own start
if TYPE_CHECKING:
    from typing import ClassVar


class HtmlFragment:
    """HTML that a notebook displays, and the text that stands for it elsewhere."""

    def __init__(self, text: str, html: str) -> None:
        self.text, self.html = text, html

    def __repr__(self) -> str:
        return f"<{self.text}>"

    def _repr_html_(self) -> str:
        return self.html


class HtmlRepr:
    """Mixin for a value that a notebook displays as HTML.

    `by` is the module that draws, imported on first use; its html(value) returns None to fall back to text.
    """

    renderer: "ClassVar[str | None]" = None

    def _repr_html_(self) -> str | None:
        if HtmlRepr.renderer is None:
            return None
        try:
            html: str | None = import_module(HtmlRepr.renderer).render_html(self)
        except ImportError:  # the drawing module needs an extra that is not installed
            return None
        return html
