"""How the documentation is built: `python -m sphinx -W --keep-going -n -b html docs build/docs`."""

from typing import Any

import regard

project = "regard"
author = "the regard authors"
project_copyright = "2026 the regard authors"
version = release = regard.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
root_doc = "index"
html_theme = "furo"
html_title = f"regard {release}"
html_copy_source = False

myst_heading_anchors = 3  # so that a page can link to a heading of another, and the link is checked

default_role = "code"  # `this` in a docstring
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 100

# what is documented elsewhere; a name of regard that leads nowhere fails the build
nitpick_ignore = [("py:class", "Tensor"), ("py:class", "Axes")]  # of lectures/example_steps.py, which is read without PyTorch
nitpick_ignore_regex = [("py:.*", r"(torch|numpy|argparse|collections|rich|matplotlib|pathlib|typing)\b.*")]


def part_paragraphs(app: Any, what: str, name: str, obj: object, options: Any, lines: list[str]) -> None:
    """Gives what a docstring says of shapes, errors and its source a paragraph of its own."""
    starts = [index for index, line in enumerate(lines) if line.startswith(("Shapes:", "Raises ", "Source:")) and index]
    for index in reversed(starts):
        lines.insert(index, "")


def setup(app: Any) -> None:
    """What Sphinx calls."""
    app.connect("autodoc-process-docstring", part_paragraphs)
