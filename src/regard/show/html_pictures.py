"""What the pictures of a notebook share: a sheet of heads, a picture over its color scale, and the page around them."""

import html as escaping
import json
from collections.abc import Sequence
from importlib.resources import files

import torch
from torch import Tensor

from regard.show.color_ramp import choose_ink
from regard.show.svg_matrix import RAMP, SIGNED_RAMP, Matrix, format_color, render_img
from regard.show.terminal import escape_text

MAX_LISTED_WORDS = 4096  # maximum words that the pointer can show
MAX_WIDTH, MAX_HEIGHT = 760.0, 520.0  # maximum pixels of a sheet of all heads
CELL_PIXELS, HEAD_PIXELS = 3.0, 24.0  # minimum pixels of a cell of a sheet, and of a head
CAPTION = "Rows are queries, from the top; columns are keys."


def tile_heads(layers: Sequence[Tensor]) -> Tensor:
    """Lay out the heads of layers (h, rows, columns) on one sheet, one cell apart."""
    most = max(len(one) for one in layers)
    rows, columns = layers[0].shape[1:]
    sheet = torch.full((len(layers) * (rows + 1) - 1, most * (columns + 1) - 1), torch.nan, dtype=torch.float64)
    for n, layer in enumerate(layers):
        for head, found in enumerate(layer):
            y, x = n * (rows + 1), head * (columns + 1)
            sheet[y : y + rows, x : x + columns] = found
    return sheet


def render_figure(matrix: Matrix, name: str, shown: float | None = None) -> str:
    """Render a picture above its name and its color scale."""
    caption = f"{escape_html(name)}<br>" if name else ""
    return (
        '<figure style="margin: '
        f'0">{render_img(matrix, name, shown)}<figcaption>{caption}{render_legend(matrix)}</figcaption></figure>'
    )


def render_legend(matrix: Matrix) -> str:
    """Render the color scale with its numbers."""
    parts = []
    for step in range(5):
        value = matrix.scale.get_value(step / 4, matrix.ends)
        paper = matrix.get_color(value)
        look = f"background: {format_color(paper)}; color: {format_color(choose_ink(paper))}; padding: 0 5px; font-size: 11px"
        parts.append(f'<span style="{look}">{matrix.format_number(value)}</span>')
    return "".join(parts)


def choose_sheet_size(sheet: Tensor, tile: tuple[int, int]) -> float:
    """Return the pixels of the longer side of a sheet of heads: 3 for each cell, more where a head has few cells."""
    cell = max(CELL_PIXELS, HEAD_PIXELS / max(tile))
    return min(MAX_WIDTH if sheet.shape[1] > sheet.shape[0] else MAX_HEIGHT, cell * max(sheet.shape))


def render_page(title: str, pictures: Sequence[str], note: str, rows: Sequence[str], columns: Sequence[str]) -> str:
    """Render a title, pictures side by side, a caption, and the script that enlarges the pictures."""
    are_listed = max(len(rows), len(columns)) <= MAX_LISTED_WORDS
    listed = {
        name: [escape_text(word) for word in words] if are_listed else []
        for name, words in (("rows", rows), ("columns", columns))
    }
    data = escaping.escape(json.dumps(listed, ensure_ascii=False))
    ramps = json.dumps({"weights": RAMP, "signed": SIGNED_RAMP})
    script = files("regard.show").joinpath("notebook.js").read_text(encoding="utf-8")
    return (
        f'<div class="regard" data-words="{data}"><div>{title}</div>'
        f'<div style="display: flex; flex-wrap: wrap; gap: 12px; margin: 6px 0">{"".join(pictures)}</div>'
        f'<div class="regard-said" style="opacity: 0.75; min-height: 1.4em">{note}</div></div>'
        f"<script>(() => {{ const RAMPS = {ramps};\n{script}}})();</script>"
    )


def escape_html(text: str) -> str:
    """Escape text for HTML, with control characters spelled out and line ends as ↵."""
    return escaping.escape(escape_text(text).replace("\\n", "↵"))
