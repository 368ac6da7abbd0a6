"""HTML for notebooks of maps without a softmax: their heads, and all of a recording on one sheet."""

from collections.abc import Sequence

import torch
from torch import Tensor

from regard.map.implicit_map import ImplicitMap
from regard.map.pooling import bin_edges
from regard.observe import Recording
from regard.show.color_scale import SignedLog, choose_signed_scale
from regard.show.html_pictures import CAPTION, choose_sheet_size, escape_html, render_figure, render_page, tile_heads
from regard.show.page.implicit_pictures import SIGNED_LOG, SIGNS, build_implicit_map, list_implicit_layers
from regard.show.svg_matrix import Matrix

MAX_HEADS, HEAD_CELLS, SINGLE_HEAD_CELLS, TILE_CELLS = 16, 96, 240, 24  # heads drawn of a map; cells per side of each
MAX_ENTRIES = 2**24  # entries computed for all pictures of a value; beyond, rows are sampled
THUMBNAIL_PIXELS = 150.0  # of one head of several


def render_implicit_map(m: ImplicitMap) -> str:
    """Render the heads of the first batch row of a map, at most 16."""
    b, h, q, k = m.shape
    shown = min(h, MAX_HEADS)
    found, sampled = pool_entries(m, shown, SINGLE_HEAD_CELLS if h == 1 else HEAD_CELLS, MAX_ENTRIES // shown)
    words = [str(n) for n in range(k)]
    asides = words[m.offset : m.offset + q] if m.offset + q <= k else [str(n) for n in range(q)]
    is_all = h == 1 and found.shape[1:] == (q, k)
    scale = choose_signed_scale(found, max(q, k))
    ends = scale.ends(found.flatten().tolist())
    pictures = []
    for n, entries in enumerate(found):
        rows, columns = (asides, words) if is_all else (None, None)
        matrix = Matrix(entries, rows, columns, scale, ends, (q, k), is_sampled=sampled)
        pictures.append(render_figure(matrix, f"head {n}" if h > 1 else "entries", None if h == 1 else THUMBNAIL_PIXELS))
    notes = [SIGNS, SIGNED_LOG * isinstance(scale, SignedLog), f"The first of {b} batch rows." * (b > 1)]
    notes += [f"The first {shown} of {h:,} heads." * (h > shown), note_sampled(found, q) * sampled, CAPTION]
    return render_page(f"<b>ImplicitMap</b> {m.shape}, {escape_html(m.title)}", pictures, join_notes(notes), asides, words)


def render_implicit_sheet(recording: Recording, size: tuple[int, int]) -> tuple[str, str]:
    """Return a sheet of the layers without a softmax, as a picture, and its notes; both are empty if there are none.

    `size` is the number of queries and keys of the words around it.
    """
    layers, notes = list_implicit_layers(recording.last)
    if not layers:
        return "", join_notes(notes)
    q, k = layers[0].shape[2:]
    chosen = [(n, one) for n, one in enumerate(layers) if one.shape[2:] == (q, k)]
    heads = [min(one.shape[1], MAX_HEADS) for _, one in chosen]
    maps = [build_implicit_map(recording.last, one.calls) for _, one in chosen]
    found = [pool_entries(m, shown, TILE_CELLS, MAX_ENTRIES // sum(heads)) for m, shown in zip(maps, heads, strict=True)]
    sheet, is_sampled = tile_heads([entries for entries, _ in found]), found[0][1]
    scale, tile = choose_signed_scale(sheet, max(q, k)), (min(q, TILE_CELLS), min(k, TILE_CELLS))
    matrix = Matrix(
        sheet,
        [f"layer {n}" for n, _ in chosen],
        [f"head {n}" for n in range(max(heads))],
        scale,
        scale.ends(sheet.flatten().tolist()),
        (q, k),
        tile=tile,
        size=choose_sheet_size(sheet, tile),
        is_sampled=is_sampled,
        has_words=size == (q, k),
    )
    most, others = max(one.shape[1] for _, one in chosen), len(layers) - len(chosen)
    notes = [
        SIGNS,
        SIGNED_LOG * isinstance(scale, SignedLog),
        f"The first {MAX_HEADS} of up to {most:,} heads." * (most > MAX_HEADS),
        note_sampled(found[0][0], q) * is_sampled,
        f"Of other lengths, and not drawn here: {others} more; recording.map(layer, kind='implicit') shows one." * (others > 0),
        *notes,
    ]
    return render_figure(matrix, describe_layers([one.title for one in layers])), join_notes(notes)


def describe_layers(titles: Sequence[str]) -> str:
    """Describe layers without a softmax by what they compute."""
    names = ", ".join(dict.fromkeys(titles))
    return f"{len(titles)} layer{'s' * (len(titles) != 1)} without a softmax: {names}"


def note_sampled(entries: Tensor, queries: int) -> str:
    """Return the note on queries that were sampled."""
    return f"{entries.shape[1]} of the {queries:,} queries were sampled."


def join_notes(notes: Sequence[str]) -> str:
    """Join the sentences that say something, as HTML."""
    return escape_html(" ".join(filter(None, notes)))


def pool_entries(m: ImplicitMap, heads: int, most: int, quick: int) -> tuple[Tensor, bool]:
    """Compute the entries largest in size (h, rows, columns) of at most `most` bins per axis, and whether rows were sampled.

    Uses the first batch row and heads; a head of more than `quick` entries is sampled: the last query of each bin.
    """
    first = m.select(batch=[0], heads=slice(heads))
    q, k = m.shape[2:]
    size = min(q, most), min(k, most)
    if q * k <= quick:
        return first.pooled(*size, how="max")[0].double().cpu(), False
    queries = bin_edges(0, q, size[0])[1:] - 1
    bins = torch.bucketize(torch.arange(k), bin_edges(0, k, size[1])[1:], right=True)
    rows = torch.stack([first[0, head, queries].double().cpu() for head in range(heads)])
    places = bins.expand_as(rows)
    high, low = (
        rows.new_zeros(heads, len(queries), size[1]).scatter_reduce(2, places, rows, how, include_self=False)
        for how in ("amax", "amin")
    )
    return low.where(-low > high, high), True
