"""A matrix as a small picture that needs no script: an img with an SVG data URL, colors as pixels, words as text."""

import base64
import html
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.cells import cell_len
from torch import Tensor

from regard.show.color_ramp import RGB, choose_ink, shade, shade_signed
from regard.show.color_scale import ColorScale, Log, Signed, SignedLog, share_signed_log
from regard.show.terminal import truncate_end

SHADES = 232  # shades of the ramp, as many as are distinct; the next palette entry is the background
RAMP = [shade(n / (SHADES - 1)) for n in range(SHADES)]
SIGNED_RAMP = [shade_signed(2 * n / (SHADES - 2) - 1) for n in range(SHADES - 1)]  # odd, so that the one in the middle is 0
PAPER, SIGNED_PAPER, INK = (246, 246, 244), (222, 222, 218), "#33332f"  # papers that are no colors of the ramps
SIZE, LETTER, TEXT = 300, 6.3, 10.5  # pixels: a picture's longer side; a letter's width; text size
MAX_CELL = 34.0  # maximum pixels of a cell
MIN_WORD_CELL = 9.0  # cell pixels from which words are written
MIN_NUMBER_CELL = 26.0  # cell pixels from which numbers are written
MAX_LETTERS = 14  # maximum letters of a word


@dataclass(frozen=True)
class Matrix:
    """A matrix to draw: values (rows, columns), NaN where there is none; the number of tokens; and the color scale."""

    values: Tensor
    rows: Sequence[str] | None
    columns: Sequence[str] | None
    scale: ColorScale
    ends: tuple[float, float]
    tokens: tuple[int, int]
    names: tuple[str, str] = ("query", "key")
    tile: tuple[int, int] | None = None  # rows and columns of each matrix on a sheet of several
    size: float = SIZE
    is_sampled: bool = False
    has_words: bool = True  # those of the page around it

    @property
    def ramp(self) -> list[RGB]:
        """The colors of the scale."""
        return SIGNED_RAMP if isinstance(self.scale, Signed) else RAMP

    def format_number(self, value: float) -> str:
        """Format a number of the scale."""
        return f"{value:+.2g}" if value and isinstance(self.scale, Signed) else f"{value:.2g}"

    def get_color(self, value: float) -> RGB:
        """Return the color of a value."""
        return self.ramp[round((len(self.ramp) - 1) * self.scale.share(value, self.ends))]

    def compute_shares(self) -> Tensor:
        """Compute the positions of the values on the scale, from 0 to 1; NaN stays."""
        low, high = self.ends
        values = self.values.double().clamp(low, high)
        if isinstance(self.scale, SignedLog):
            return torch.from_numpy(share_signed_log(values.numpy(), high))
        if isinstance(self.scale, Log):
            return (values / low).log() / torch.tensor(high / low).double().log()
        return (values - low) / (high - low)

    @property
    def cell_description(self) -> str:
        """Description of a cell that stands for several weights, empty where each cell is one weight."""
        rows, columns = self.tile or self.values.shape
        if self.tokens[0] <= rows and self.tokens[1] <= columns:
            return ""
        size = "in size " if isinstance(self.scale, Signed) else ""
        return f"largest {size}sampled " if self.is_sampled else f"largest {size}"


@dataclass(frozen=True)
class Frame:
    """Position of the cells in the picture, in its pixels."""

    x: float
    y: float
    w: float
    h: float
    width: float
    height: float


def render_img(matrix: Matrix, name: str, shown: float | None = None) -> str:
    """Render the picture as an HTML element, with `name` as alt text and the meaning of its pixels as data for the script."""
    frame = compute_frame(matrix)
    address = base64.b64encode(render_svg(matrix, frame).encode()).decode()
    rows, columns = matrix.values.shape
    fields: Mapping[str, Any] = vars(frame) | {
        "rows": rows,
        "columns": columns,
        "q": matrix.tokens[0],
        "k": matrix.tokens[1],
        "names": matrix.names,
        "ends": matrix.ends,
        "ramp": "signed" if isinstance(matrix.scale, Signed) else "weights",
        "log": isinstance(matrix.scale, Log | SignedLog),
        "stands": matrix.cell_description,
        "tile": matrix.tile,
        "tileWords": None if matrix.tile is None else (matrix.rows, matrix.columns),
        "rowWords": "rows" if matrix.has_words else None,
        "columnWords": "columns" if matrix.has_words else None,
    }
    return (
        '<span style="display: inline-block; overflow: hidden; max-width: 100%; vertical-align: top">'
        f'<img src="data:image/svg+xml;base64,{address}" alt="{html.escape(name)}" '
        f'style="width: {shown or frame.width:.0f}px; max-width: 100%; display: block" '
        f'data-frame="{html.escape(json.dumps(fields))}"></span>'
    )


def compute_frame(matrix: Matrix) -> Frame:
    """Lay out the cells, with words beside them where these fit."""
    rows, columns = matrix.values.shape
    cell = min(max(matrix.size / max(rows, columns), 0.1), MAX_CELL)
    w, h = columns * cell, rows * cell
    left, above = measure_words(matrix.rows, h), measure_words(matrix.columns, w)
    return Frame(left, above, w, h, round(left + w + 1), round(above + h + 1))


def measure_words(words: Sequence[str] | None, length: float) -> float:
    """Compute the pixels that words beside cells take; 1 where a word would have too little space along the cells."""
    fits = words is not None and len(words) > 0 and length / len(words) >= MIN_WORD_CELL
    return 4 + LETTER * max(map(count_letters, words)) if fits and words is not None else 1.0


def count_letters(word: str) -> int:
    """Return the width of a word as drawn, in letters."""
    return cell_len(truncate_end(word, MAX_LETTERS))


def render_svg(matrix: Matrix, frame: Frame) -> str:
    """Render the picture as SVG."""
    address = base64.b64encode(encode_png(matrix)).decode()
    return "".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {frame.width} {frame.height}" ',
            f'width="{frame.width}" height="{frame.height}" font-family="sans-serif" font-size="{TEXT}">',
            '<rect width="100%" height="100%" fill="white"/>',
            f'<image x="{frame.x}" y="{frame.y}" width="{frame.w}" height="{frame.h}" preserveAspectRatio="none" ',
            f'style="image-rendering: pixelated" href="data:image/png;base64,{address}"/>',
            *([render_edge(frame)] if isinstance(matrix.scale, Signed) else []),  # 0 is white, as is the page
            *render_words(matrix, frame),
            *render_numbers(matrix, frame),
            "</svg>",
        )
    )


def render_edge(frame: Frame) -> str:
    """Render a thin line around the cells."""
    place = f'x="{frame.x - 0.5}" y="{frame.y - 0.5}" width="{frame.w + 1}" height="{frame.h + 1}"'
    return f'<rect {place} fill="none" stroke="{format_color(SIGNED_PAPER)}"/>'


def render_words(matrix: Matrix, frame: Frame) -> list[str]:
    """Render the words beside the cells, each beside several cells on a sheet of heads, those of the columns rotated."""
    found = []
    if matrix.rows is not None and frame.x > 1:
        each = frame.h / len(matrix.rows)
        for n, word in enumerate(matrix.rows):
            place = f'x="{frame.x - 3}" y="{frame.y + (n + 0.5) * each:.1f}" dy=".35em" text-anchor="end"'
            found.append(render_word(word, f'{place} font-size="{min(TEXT, each):.1f}"'))
    if matrix.columns is not None and frame.y > 1:
        each = frame.w / len(matrix.columns)
        for n, word in enumerate(matrix.columns):
            place = f'transform="translate({frame.x + (n + 0.5) * each:.1f} {frame.y - 3}) rotate(-90)" dy=".35em"'
            found.append(render_word(word, f'{place} font-size="{min(TEXT, each):.1f}"'))
    return found


def render_word(word: str, place: str) -> str:
    """Render a word as an SVG text element, escaped."""
    return f'<text {place} fill="{INK}">{html.escape(truncate_end(word, MAX_LETTERS))}</text>'


def render_numbers(matrix: Matrix, frame: Frame) -> list[str]:
    """Render the numbers in the cells where these are large enough."""
    cell = frame.h / matrix.values.shape[0]
    if cell < MIN_NUMBER_CELL or matrix.tile is not None:
        return []
    found = []
    for row, line in enumerate(matrix.values.tolist()):
        for column, value in enumerate(line):
            if value == value:
                paper = matrix.get_color(value)
                place = f'x="{frame.x + (column + 0.5) * cell:.1f}" y="{frame.y + (row + 0.5) * cell:.1f}"'
                look = f'dy=".35em" text-anchor="middle" font-size="{TEXT - 1}" fill="{format_color(choose_ink(paper))}"'
                found.append(f"<text {place} {look}>{value:.2f}</text>")
    return found


def encode_png(matrix: Matrix) -> bytes:
    """Encode the cells as PNG pixels of a palette: the ramp, and the background where there is no value."""
    from PIL import Image  # an extra, which visibility_picture does not need

    indices = (matrix.compute_shares() * (len(matrix.ramp) - 1)).round().nan_to_num(SHADES).to(torch.uint8)
    image = Image.fromarray(indices.numpy())
    paper = SIGNED_PAPER if isinstance(matrix.scale, Signed) else PAPER
    colors = [*matrix.ramp, *[paper] * (SHADES + 1 - len(matrix.ramp))]
    image.putpalette([part for color in colors for part in color])
    buffer = io.BytesIO()
    image.save(buffer, format="png", optimize=True)
    return buffer.getvalue()


def format_color(colour: tuple[int, int, int]) -> str:
    """Format a color for CSS."""
    return "#" + "".join(f"{part:02x}" for part in colour)
