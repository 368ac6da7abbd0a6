"""Layers without a softmax in the terminal: a table of them, one head, one row."""

import math
from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
from rich.style import Style
from rich.text import Text
from torch import Tensor

from regard.errors import ConfigError
from regard.map.implicit_map import ImplicitMap
from regard.observe import Recording
from regard.observe.text_table import align_columns, format_token
from regard.show.axis_words import AxisWords, find_word, get_axis_words, strip_markers
from regard.show.color_scale import Signed
from regard.show.heat_map import describe_signs, format_entry, render_heat_map, render_legend, render_nan_note, wrap_sentence
from regard.show.number_format import format_count
from regard.show.page.implicit_pictures import ImplicitLayer, build_implicit_map, list_implicit_layers
from regard.show.recording_views import (
    BAR_SHADE,
    MAX_BARS,
    WIDE_SCREEN,
    WORD_CELLS,
    WORDS_BEFORE,
    LayerHead,
    format_bar,
    format_label,
    format_position,
)
from regard.show.shaded_text import MAX_TOKENS, limit_lines, render_shaded_text
from regard.show.terminal import escape_text, quote_token
from regard.show.terminal_colors import Heat, TerminalArea

NAME_CELLS = 30  # maximum cells of a module's name in the table


def count_layers(recording: Recording) -> int:
    """Return the number of layers without a softmax that can be shown. Raises ConfigError if there are none."""
    layers, notes = list_implicit_layers(recording.last)
    if not layers:
        raise ConfigError(" ".join(notes))
    return len(layers)


def render_layers(recording: Recording, width: int) -> Iterator[Text]:
    """Generate a table of the layers without a softmax: equal ones that follow each other take one line."""
    layers, notes = list_implicit_layers(recording.last)
    groups = [list(group) for _, group in groupby(enumerate(layers), key=lambda pair: (pair[1].title, pair[1].shape))]
    cells, columns = [], 4 if width >= WIDE_SCREEN else 3
    for group in groups:
        (first, one), (last, _) = group[0], group[-1]
        places = str(first) if first == last else f"{first} to {last}"
        cells.append((places, f"{one.shape[1]:,}", one.title, format_token(one.name, NAME_CELLS))[:columns])
    names = ("layer", "heads", "no softmax", "first module")[:columns]
    yield from map(Text, align_columns(names, cells, names[2:]))
    yield from (line for note in notes for line in wrap_sentence(note, width))


def render_head(recording: Recording, place: LayerHead, window: TerminalArea) -> Iterator[Text]:
    """Generate the heat map of the signed entries of a head, or of the mean of the heads of a layer."""
    one, m, title = select_map(recording, place)
    yield from render_heat_map(m, get_words(recording, one)[1], title, window)


def render_row(
    recording: Recording, place: LayerHead | None, query_text: str, window: TerminalArea, show_all: bool
) -> Iterator[Text]:
    """Generate what multiplies the values in the output of a token, as shaded text and as signed bars."""
    if place is None:
        raise ConfigError("a row of a layer without a softmax needs the layer: --head L.H, or --head L for its mean.")
    one, m, title = select_map(recording, place)
    words = get_words(recording, one)[1]
    number, places = find_word(query_text, words)
    query = number - m.offset
    if not 0 <= query < m.shape[2]:
        raise ConfigError(f"token {number} was not recorded as a query: these are tokens {m.offset} to {len(words) - 1}.")
    row = m[0, :, query].double().mean(0).cpu()
    heading = f"what {quote_token(strip_markers(words[number]))}, token {number:,}, took from each token: {title}"
    yield from wrap_sentence(heading, window.width, "bold")
    if len(places) > 1:
        again = f"It occurs {len(places):,} times, and this is the last; select another by its number."
        yield from wrap_sentence(again, window.width)
    scale = Signed()
    heat = Heat(scale, scale.ends(row.tolist()))
    if len(words) <= MAX_TOKENS:
        shaded = render_shaded_text(words, row, heat, window, marked=number)
        yield from limit_lines(shaded, show_all, window, len(words), marked=True)
        yield from render_legend(heat, window)
    yield from wrap_sentence(describe_signs(window, has_digits=window.colors is None), window.width)
    yield from render_nan_note(row, window.width)
    yield Text()
    yield from render_signed_bars(row, words, number, window, heat, len(words) if show_all else MAX_BARS)


def select_map(recording: Recording, place: LayerHead) -> tuple[ImplicitLayer, ImplicitMap, str]:
    """Return a layer, the map (1, h, q, k) of its head or of all its heads in the first batch row, and a title."""
    layers, _ = list_implicit_layers(recording.last)
    number, head = place
    if not 0 <= number < len(layers):
        count = f"there {'is' if len(layers) == 1 else 'are'} {format_count(len(layers), 'layer')}"
        raise ConfigError(f"layer {number} is out of range: {count} without a softmax, from 0.")
    one = layers[number]
    if head is not None and not 0 <= head < one.shape[1]:
        count = format_count(one.shape[1], "head")
        raise ConfigError(f"head {head} is out of range: layer {number} has {count} without a softmax, from 0.")
    m = build_implicit_map(recording.last, one.calls).select(batch=[0], heads=slice(None) if head is None else [head])
    named = "the mean of its heads" if head is None else f"head {head}"
    return one, m, f"layer {number}, {named}: {escape_text(one.title)}"


def get_words(recording: Recording, one: ImplicitLayer) -> AxisWords:
    """Return the words of the queries and of the keys of a layer, or their indices."""
    return get_axis_words(recording, one.calls[0][0], "implicit", None, 0, one.shape[2:])


def render_signed_bars(
    row: Tensor, words: Sequence[str], own: int, window: TerminalArea, heat: Heat, most: int
) -> Iterator[Text]:
    """Generate a line for each of the entries (k,) largest in size: the entry, the word, its position, and a bar."""
    order = [key for key in torch.argsort(row.abs(), descending=True, stable=True)[:most].tolist() if row[key]]
    before = WORDS_BEFORE if window.colors else 0
    labels = [format_label(words, key, before, min(WORD_CELLS, window.width // 4)) for key in order]
    places = [format_position(key, own, len(f"{max(order):,}"), False) for key in order]
    side, place = max((one.cell_len for one in labels), default=0), max(map(len, places), default=0)
    room = window.width - side - place - 11
    for key, word, far in zip(order, labels, places, strict=True):
        entry = float(row[key])
        line = Text.assemble(f"{format_entry(entry):>6}  ", word, " " * (side - word.cell_len + 2), (far.ljust(place), "dim"))
        if room >= 4:
            share = abs(entry / float(row[order[0]]))
            paper = heat.find_paper(BAR_SHADE * math.copysign(heat.ends[1], entry), window.colors) if window.colors else None
            style = Style(color=paper[0]) if paper else Style()
            line.append(" ").append(format_bar(share, room - 1, window.colors), style=style)
        yield line
    left = int((row != 0).sum()) - len(order)
    if left:
        yield Text(f"and {left:,} other{'s' * (left > 1)}", style="dim")
