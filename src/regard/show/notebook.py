"""HTML for notebooks of a map, a recording, a table of heads, steps and a report; the pictures need no script.

With scripts enabled, a click enlarges a picture, wheel and drag zoom and pan it, and the pointer shows what is under it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import adaptive_max_pool2d

from regard.errors import RegardError
from regard.examination.report import Report
from regard.map import AttentionMap
from regard.map.implicit_map import ImplicitMap
from regard.map.pooling import bin_edges
from regard.mechanism import Steps
from regard.observe import Recording
from regard.observe.classification.head_scores import UNBOUNDED_SCORES
from regard.observe.head_table import Heads
from regard.observe.recorded_runs.run import KINDS
from regard.show.axis_words import get_axis_words
from regard.show.color_ramp import choose_ink, shade
from regard.show.color_scale import MAX_LINEAR_TOKENS, MIN_LOG_WEIGHT, LinearScale, Log, Scale, choose_scale
from regard.show.html_pictures import CAPTION, choose_sheet_size, escape_html, render_figure, render_page, tile_heads
from regard.show.number_format import format_count
from regard.show.page.single_file import frame_page as frame_page  # Recording.page calls it here
from regard.show.report_html import render_report
from regard.show.signed_html import render_implicit_map, render_implicit_sheet
from regard.show.step_descriptions import make_titles
from regard.show.svg_matrix import Matrix, format_color

# heads of a map that are drawn; cells per side of each; of a single head
MAX_HEADS, HEAD_CELLS, SINGLE_HEAD_CELLS = 16, 96, 240
TILE_CELLS, MAX_SHEET_WEIGHTS = 24, 2**28  # cells per side of each head of a recording; maximum weights read for a sheet
MAX_LETTERS = 400  # letters shown of a recording's text
THUMBNAIL_PIXELS = 150.0  # pixels of one head of several
MAX_FULL_WEIGHTS = 2**24  # maximum weights of a head that are all read
CHUNK_WEIGHTS = 2**22  # maximum weights in memory at a time


def render_html(thing: object) -> str | None:
    """Render a value as HTML; return None where there is nothing to draw."""
    drawers: dict[type, Callable[[Any], str]] = {
        AttentionMap: render_map,
        ImplicitMap: render_implicit_map,
        Recording: render_recording,
        Heads: render_heads,
        Steps: render_steps,
        Report: render_report,
    }
    try:
        return next((drawer(thing) for kind, drawer in drawers.items() if isinstance(thing, kind)), None)
    except RegardError:  # for example, nothing was recorded
        return None


def render_map(m: AttentionMap) -> str:
    """Render the heads of the first batch row of a map, at most 16."""
    b, h, q, k = m.shape
    shown = min(h, MAX_HEADS)
    found, sampled = pool_cells(m.select(heads=list(range(shown))), SINGLE_HEAD_CELLS if h == 1 else HEAD_CELLS)
    words = [str(n) for n in range(k)]
    asides = words[k - q :] if k >= q else [str(n) for n in range(q)]
    is_all = h == 1 and found.shape[1:] == (q, k)
    look = choose_weight_scale(found, max(q, k))  # one for all heads, so that their colors can be compared
    pictures = []
    for n, weights in enumerate(found):
        matrix = Matrix(weights, asides if is_all else None, words if is_all else None, *look, (q, k), is_sampled=sampled)
        pictures.append(render_figure(matrix, f"head {n}" if h > 1 else "weights", None if h == 1 else THUMBNAIL_PIXELS))
    notes = [f"The first of {b} batch rows."] * (b > 1) + [f"The first {shown} of {h} heads."] * (h > shown)
    notes += [f"{found.shape[1]} of the {q:,} queries were sampled."] * sampled
    title = f"<b>AttentionMap</b> {m.shape}, {escape_html(str(m.planes.request.mask))}"
    return render_page(title, pictures, " ".join([*notes, CAPTION]), asides, words)


def render_recording(recording: Recording) -> str:
    """Render the beginning of the text of a recording, and every head of its last run as a small picture."""
    if not any(recording.layers(kind) for kind in KINDS):
        return render_implicit_recording(recording)
    kind = "self" if recording.layers() else "cross"
    maps = [recording.map(layer, kind=kind) for layer in range(len(recording.layers(kind)))]
    shapes = [m.shape for m in maps]
    q, k = shapes[0][2:]
    count = sum(h for _, h, _, _ in shapes)
    counts = ", ".join(format_count(n, noun) for n, noun in ((len(maps), "layer"), (count, "head"), (k, "token")))
    title = f"<b>{escape_html(recording.model or 'Recording')}</b>, {counts}"
    words = get_axis_words(recording, 0, kind, None, 0, (q, k))[1]
    title += render_start(recording, words)
    if count * min(q, TILE_CELLS) * k > MAX_SHEET_WEIGHTS or len({shape[2:] for shape in shapes}) > 1:
        picture, notes = render_implicit_sheet(recording, (q, k))
        return render_page(f"{title}{TOO_LONG}", [picture], notes, [], words) if picture else f"<div>{title}{TOO_LONG}</div>"
    found = [pool_cells(m, TILE_CELLS, MAX_SHEET_WEIGHTS // count) for m in maps]
    sheet = tile_heads([weights for weights, _ in found])
    numbers = max((recording.heads(layer, kind) for layer in range(len(maps))), key=len)  # in the model, of those recorded
    heads, layers = ([f"{name} {n}" for n in places] for name, places in (("head", numbers), ("layer", range(len(maps)))))
    tile = min(q, TILE_CELLS), min(k, TILE_CELLS)
    linear = isinstance(choose_scale(sheet, max(q, k)), LinearScale)
    look: tuple[Scale, tuple[float, float]] = (LinearScale(), (0.0, 1.0)) if linear else (Log(), (MIN_LOG_WEIGHT, 1.0))
    matrix = Matrix(sheet, layers, heads, *look, (q, k), tile=tile, size=choose_sheet_size(sheet, tile), is_sampled=found[0][1])
    sampled = f" {TILE_CELLS} of the {q:,} queries were sampled." if found[0][1] else ""
    implicit, notes = render_implicit_sheet(recording, (q, k))
    summary = f"In each picture {CAPTION[0].lower()}{CAPTION[1:]}{sampled} {notes}".rstrip()
    return render_page(title, [render_figure(matrix, ""), implicit], summary, words[k - q :] if k >= q else [], words)


def render_implicit_recording(recording: Recording) -> str:
    """Render the text and the layers of a recording in which no layer has a softmax."""
    q, k = recording.map(0, kind="implicit").shape[2:]
    picture, notes = render_implicit_sheet(recording, (q, k))
    rows, words = get_axis_words(recording, 0, "implicit", None, 0, (q, k))
    title = f"<b>{escape_html(recording.model or 'Recording')}</b>, {format_count(k, 'token')}{render_start(recording, words)}"
    return render_page(title, [picture], f"{CAPTION} {notes}", rows, words)


def render_start(recording: Recording, words: list[str]) -> str:
    """Render the beginning of the text of a recording."""
    text = "".join(words) if recording.tokens else ""
    return f"<div>{escape_html(text[:MAX_LETTERS])}{'…' * (len(text) > MAX_LETTERS)}</div>"


TOO_LONG = "Too long to draw every head at once: regard.figure(recording, layer, head) draws one, regard.serve(recording) all."


def render_steps(steps: Steps) -> str:
    """Render each step that changed something with its formula, for the first batch row and head."""
    one = Steps(*(step.detach()[(0,) * (step.dim() - 2)].cpu() for _, step in steps.items()))
    (q, k), hidden, pictures = one.scores.shape, one.masked == -torch.inf, []
    for name, formula in make_titles(one).items():
        weighs = name in ("weights", "dropped")
        step = getattr(one, name).double()
        values = pool_matrix(step.masked_fill(hidden if weighs else step == -torch.inf, torch.nan))
        scale = LinearScale(low=0) if weighs else LinearScale()  # linear as in the other steps, which stand beside it
        look = scale, scale.ends(values.flatten().tolist())
        names = ("query", "number" if name == "context" else "key")
        pictures.append(render_figure(Matrix(values, None, None, *look, (step.shape[0], step.shape[1]), names), formula))
    first = " Each picture is the first matrix of its step." if one.scores.numel() < steps.scores.numel() else ""
    numbers = [str(n) for n in range(max(q, k))]
    return render_page(f"<b>Steps</b> of {q} queries and {k} keys", pictures, CAPTION + first, numbers, numbers)


def choose_weight_scale(weights: Tensor, tokens: int) -> tuple[Scale, tuple[float, float]]:
    """Return the color scale that fits the weights, the same for all long texts, and its ends."""
    if tokens > MAX_LINEAR_TOKENS:
        return Log(), (MIN_LOG_WEIGHT, 1.0)
    scale = choose_scale(weights, tokens)
    return scale, scale.ends(weights.flatten().tolist())


def pool_matrix(values: Tensor) -> Tensor:
    """Pool a matrix to at most 240 cells per side, each the largest of its values; NaN where there is none."""
    if max(values.shape) <= SINGLE_HEAD_CELLS:
        return values
    found: Tensor = adaptive_max_pool2d(values.nan_to_num(-torch.inf)[None], [min(n, SINGLE_HEAD_CELLS) for n in values.shape])[
        0
    ]
    return found.masked_fill(found == -torch.inf, torch.nan)


def render_heads(heads: Heads) -> str:
    """Render the table of heads, each score from 0 to 1 on its color."""
    titles = ["head", "kind", *heads.detectors]
    top = "".join(
        f'<th style="text-align: {"left" if n < 2 else "right"}">{escape_html(one)}</th>' for n, one in enumerate(titles)
    )
    lines = []
    for row in heads:
        found = (
            f'<td style="text-align: left">{row.layer}.{row.head}</td><td style="text-align: left">{escape_html(row.kind)}</td>'
        )
        lines.append(
            "<tr>"
            f"{found}{''.join(render_score(score, name not in UNBOUNDED_SCORES) for name, score in row.scores.items())}</tr>"
        )
    notes = "".join(f"<div>{escape_html(note)}</div>" for note in heads.notes)
    table = f"<table><thead><tr>{top}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    return f'<div style="max-height: 420px; overflow: auto">{table}</div>{notes}'


def render_score(score: float, share: bool) -> str:
    """Render a cell of the table, on its color where the score is a share."""
    paper = shade(score) if share and 0 <= score <= 1 else None
    look = f"; background: {format_color(paper)}; color: {format_color(choose_ink(paper))}" if paper else ""
    return f'<td style="text-align: right; padding: 1px 6px{look}">{"–" if score != score else f"{score:.2f}"}</td>'


def pool_cells(m: AttentionMap, most: int, quick: int = MAX_FULL_WEIGHTS) -> tuple[Tensor, bool]:
    """Compute the largest weights (h, rows, columns) of at most `most` bins per axis, and whether only some rows were sampled.

    Uses the first batch row; a head of more than `quick` weights is sampled. A bin that is 0 everywhere, for example because
    its keys are hidden, is NaN.
    """
    _, h, q, k = m.shape
    size = min(q, most), min(k, most)
    first = m.select(batch=[0])
    if q * k <= quick:
        found = first.pooled(*size, how="max")[0]
    else:
        found = torch.stack([sample_rows(first.select(heads=[head]), *size) for head in range(h)])
    return found.double().cpu().masked_fill(found.cpu() == 0, torch.nan), q * k > quick


def sample_rows(m: AttentionMap, rows: int, columns: int) -> Tensor:
    """Compute some queries of a map of one matrix, with the columns in bins of the largest weight."""
    q, k = m.shape[2:]
    queries = bin_edges(0, q, rows)[1:] - 1  # the last of each bin, which sees the most keys
    bins = torch.bucketize(torch.arange(k), bin_edges(0, k, columns)[1:], right=True)
    found = []
    for part in queries.split(max(CHUNK_WEIGHTS // k, 1)):
        weights = m[0, 0, part].cpu()
        found.append(weights.new_zeros(len(part), columns).scatter_reduce(1, bins.expand(len(part), -1), weights, "amax"))
    return torch.cat(found)
