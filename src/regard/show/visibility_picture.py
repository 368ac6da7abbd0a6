"""Visible keys as one small picture: expected, found and difference side by side, an img of SVG that needs no script."""

import base64
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from regard.examination.report import Visibility
from regard.show.color_ramp import shade
from regard.show.color_scale import MIN_LOG_WEIGHT, Log
from regard.show.svg_matrix import LETTER, TEXT, count_letters, format_color, render_word

MAX_TOKENS = 24  # maximum tokens drawn per side
# pixels: approximate side of a square; maximum and minimum side of a cell
SQUARE_PIXELS, MAX_CELL, MIN_CELL = 150.0, 22.0, 10.0
GAP, TITLE = 20.0, 18.0  # pixels
PAPER, FAINT = "#f1f1ee", "#66615a"
EXTRA_COLOR, MISSING_COLOR = "#b0400c", "#0a75af"  # seen but not allowed; allowed but not seen
SHADES = 6  # shades of what is found, deeper for more
Cells = Mapping[str, Tensor]  # color -> its cells, bool (rows, columns)


@dataclass(frozen=True, eq=False)
class VisibilityCrop:
    """The part of a `Visibility` that is drawn, and the words of its rows and columns."""

    expected: Tensor
    found: Tensor
    strength: Tensor
    difference: Tensor
    rows: tuple[str, ...]
    columns: tuple[str, ...]

    @property
    def unmeasured_cells(self) -> Tensor:
        """Cells of rows that were not measured."""
        return self.strength.isnan().any(-1, keepdim=True).expand(self.found.shape)

    @property
    def cell(self) -> float:
        """Pixels of a cell."""
        return max(MIN_CELL, min(MAX_CELL, SQUARE_PIXELS / max(self.found.shape)))


def render_picture(sight: Visibility) -> str:
    """Render the picture as an HTML element, with the number of differences as its alt text."""
    svg, width = render_svg(crop_visibility(sight))
    address = base64.b64encode(svg.encode()).decode()
    q, k = sight.expected.shape
    name = f"who sees whom: {int(sight.difference.count_nonzero()):,} of {q * k:,} pairs differ from what is expected"
    return f'<img src="data:image/svg+xml;base64,{address}" alt="{name}" style="width: {width:.0f}px; max-width: 100%">'


def describe_picture(sight: Visibility) -> str:
    """Describe how to read the picture: the signs that occur in it, and that it is a part where it is one."""
    part = crop_visibility(sight)
    signs = {
        "+ sees what it may not": part.difference > 0,
        "− does not see what it may": part.difference < 0,
        "? was not measured": part.unmeasured_cells,
    }
    sentences = ["Rows are queries, columns are keys; the deeper the blue, the more a key moves the query's output."]
    agreement = "; ".join(sign for sign, cells in signs.items() if cells.any()) or "Every pair is as expected"
    sentences.append(f"{agreement}.")
    q, k = sight.expected.shape
    if part.found.shape != sight.found.shape:
        sentences.append(f"{len(part.rows)} of {q:,} queries and {len(part.columns)} of {k:,} keys are drawn.")
    return " ".join(sentences)


def crop_visibility(sight: Visibility) -> VisibilityCrop:
    """Return all of a short `Visibility`, or the part of a longer one around the first difference."""
    differing = sight.difference.nonzero()
    i, j = differing[0].tolist() if len(differing) else (0, 0)
    rows, columns = (center_slice(place, size) for place, size in zip((i, j), sight.expected.shape, strict=True))
    tables = sight.expected, sight.found, sight.strength, sight.difference
    expected, found, strength, difference = (table[rows][:, columns] for table in tables)
    queries = sight.words[len(sight.words) - len(sight.expected) :]
    return VisibilityCrop(expected, found, strength, difference, queries[rows], sight.words[columns])


def center_slice(place: int, size: int) -> slice:
    """Return the slice of at most 24 indices around a place."""
    start = max(0, min(place - MAX_TOKENS // 2, size - MAX_TOKENS))
    return slice(start, start + MAX_TOKENS)


def render_svg(part: VisibilityCrop) -> tuple[str, float]:
    """Render the picture as SVG and return it with its width."""
    rows, columns = part.found.shape
    left = 8 + LETTER * max(map(count_letters, part.rows))
    above = TITLE + 8 + LETTER * max(map(count_letters, part.columns))
    across = max(columns * part.cell, LETTER * len("difference")) + GAP
    width, height = left + 3 * across, above + rows * part.cell + 4
    squares = {
        "expected": {format_color(shade(1)): part.expected},
        "found": color_found(part),
        "difference": {EXTRA_COLOR: part.difference > 0, MISSING_COLOR: part.difference < 0},
    }
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" ',
        f'width="{width:.0f}" height="{height:.0f}" font-family="sans-serif" font-size="{TEXT}">',
        '<rect width="100%" height="100%" rx="4" fill="white"/>',
    ]
    for n, word in enumerate(part.rows):
        lines.append(
            render_word(word, f'x="{left - 4:.1f}" y="{above + (n + 0.5) * part.cell:.1f}" dy=".35em" text-anchor="end"')
        )
    for n, (title, cells) in enumerate(squares.items()):
        lines += render_square(part, title, cells, (left + n * across, above))
    return "".join([*lines, "</svg>"]), width


def render_square(part: VisibilityCrop, title: str, cells: Cells, corner: tuple[float, float]) -> Iterator[str]:
    """Render a title, the rotated words of the columns, the cells, and the signs in them."""
    (x, y), cell = corner, part.cell
    yield render_word(title, f'x="{x:.1f}" y="{TEXT + 3}" font-weight="bold"')
    for n, word in enumerate(part.columns):
        yield render_word(word, f'transform="translate({x + (n + 0.5) * cell:.1f} {y - 4:.1f}) rotate(-90)" dy=".35em"')
    rows, columns = part.found.shape
    yield f'<g transform="translate({x:.1f} {y:.1f}) scale({cell:.2f})">'
    yield f'<path fill="{PAPER}" d="M0 0h{columns}v{rows}h-{columns}z"/>'
    for colour, table in cells.items():
        yield f'<path fill="{colour}" d="{render_path(table)}"/>' if table.any() else ""
    lines = "".join(f"M0 {n}h{columns}" for n in range(rows + 1)) + "".join(f"M{n} 0v{rows}" for n in range(columns + 1))
    yield f'<path stroke="white" stroke-width=".08" d="{lines}"/></g>'
    if title != "expected":
        yield from render_signs(part, title, corner)


def render_signs(part: VisibilityCrop, title: str, corner: tuple[float, float]) -> Iterator[str]:
    """Render + and − on the cells that differ and ? on those not measured; each sign is one element with all its places."""
    marks = {"?": (part.unmeasured_cells, FAINT)}
    if title == "difference":
        marks |= {"+": (part.difference > 0, "white"), "−": (part.difference < 0, "white")}
    size = 0.7 * part.cell
    for sign, (cells, ink) in marks.items():
        places = cells.nonzero().tolist()
        across = " ".join(f"{corner[0] + (j + 0.5) * part.cell:.0f}" for _, j in places)
        down = " ".join(f"{corner[1] + (i + 0.5) * part.cell + 0.35 * size:.0f}" for i, _ in places)
        look = f'font-size="{size:.0f}" font-weight="bold" text-anchor="middle" fill="{ink}"'
        yield f'<text x="{across}" y="{down}" {look}>{sign * len(places)}</text>' if places else ""


def color_found(part: VisibilityCrop) -> Cells:
    """Return the cells that are seen, deeper for more, on a logarithmic scale because a small leak is a leak."""
    ends = (MIN_LOG_WEIGHT, 1.0)
    steps = part.strength.nan_to_num().double().apply_(lambda value: round((SHADES - 1) * Log().share(value, ends)))
    seen = part.found & ~part.unmeasured_cells
    return {format_color(shade(0.4 + 0.6 * n / (SHADES - 1))): seen & (steps == n) for n in range(SHADES)}


def render_path(cells: Tensor) -> str:
    """Render cells as an SVG path, adjacent cells of a row as one."""
    found = []
    for row, line in enumerate(cells.tolist()):
        edges = [n for n in range(len(line) + 1) if (n > 0 and line[n - 1]) != (n < len(line) and line[n])]
        found += [
            f"M{start} {row}h{stop - start}v1h{start - stop}z" for start, stop in zip(edges[::2], edges[1::2], strict=True)
        ]
    return "".join(found)
