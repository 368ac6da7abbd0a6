"""Details of a recording in the terminal: its words by the attention they receive, one head, one row."""

from collections.abc import Iterator, Sequence

import torch
from rich.cells import cell_len
from rich.style import Style
from rich.text import Text
from torch import Tensor

from regard.errors import ConfigError
from regard.observe import Recording
from regard.observe.classification.head_classification import classify_heads
from regard.observe.classification.head_scores import HeadOptions
from regard.show.axis_words import AxisWords, find_word, get_axis_words, strip_markers
from regard.show.color_scale import Log
from regard.show.heat_map import render_heat_map, render_nan_note, wrap_sentence
from regard.show.shaded_text import BLANK, BREAK, MAX_TOKENS, compute_attention_shares, limit_lines, render_shaded_text
from regard.show.terminal import quote_token, truncate_end, truncate_start
from regard.show.terminal_colors import Heat, TerminalArea, get_color

PALEST_FRACTION = 0.01  # fraction of the largest value that has the palest color

LayerHead = tuple[int, int | None]  # layer and head; head None is the mean of all heads
MIN_WEIGHT = 5e-4  # smallest weight that rounds to 0.001
MAX_BARS = 12  # number of bars by default
WORD_CELLS, WORDS_BEFORE = 24, 3  # maximum cells of a word with those before it; how many words before it
WIDE_SCREEN = 60  # cells of a screen from which number and distance both fit
BAR_SHADE = 0.6  # shade of a bar, visible on dark and light screens
EIGHTHS = " ▏▎▍▌▋▊▉█"


def parse_layer_head(text: str) -> LayerHead:
    """Parse a layer and a head from 3.5, or a layer alone from 3. Raises ConfigError for other text."""
    numbers = text.split(".")
    if len(numbers) > 2 or not all(one.isdecimal() and len(one) < 10 for one in numbers):
        raise ConfigError(f"a head must be given as layer and number, like 3.5, or a layer like 3; got {text!r}.")
    return int(numbers[0]), int(numbers[1]) if len(numbers) == 2 else None


def render_text(recording: Recording, window: TerminalArea, show_all: bool, kind: str = "self") -> Iterator[Text]:
    """Generate the words, shaded by their share of all attention."""
    count = recording.map(0, kind=kind).shape[3]
    if not recording.tokens:
        return
    if count > MAX_TOKENS:
        yield from wrap_sentence(
            f"The attention that each token receives is shown for at most {MAX_TOKENS:,} tokens; --query shows one token.",
            window.width,
        )
        return
    words, values = get_layer_words(recording, 0, kind)[1], compute_attention_shares(recording, kind)
    heat = make_log_heat(values)
    yield from wrap_sentence("the share of all attention, in all heads, that each token receives:", window.width)
    yield from limit_lines(render_shaded_text(words, values, heat, window), show_all, window, count)
    yield heat.render_legend(window.colors, window.width)
    yield from render_nan_note(values, window.width)


def get_layer_words(recording: Recording, layer: int, kind: str) -> AxisWords:
    """Return the words of the queries and of the keys of a layer, or their indices."""
    return get_axis_words(recording, layer, kind, None, 0, recording.map(layer, kind=kind).shape[2:])


def render_head(recording: Recording, place: LayerHead, window: TerminalArea, kind: str = "self") -> Iterator[Text]:
    """Generate the heat map of a head, or of the mean of the heads of a layer."""
    m = recording.map(*place, kind=kind).select(batch=0)
    asking, answering = get_layer_words(recording, place[0], kind)
    yield from render_heat_map(
        m, answering, describe_place(recording, place, kind), window, asking if kind == "cross" else None
    )


def render_row(
    recording: Recording, place: LayerHead | None, query_text: str, window: TerminalArea, show_all: bool, kind: str = "self"
) -> Iterator[Text]:
    """Generate what a word attends to, as shaded text and as bars: in one head, or the mean of a layer or of all layers."""
    layers = range(len(recording.layers(kind))) if place is None else [place[0]]
    maps = [recording.map(layer, place[1] if place else None, kind).select(batch=0) for layer in layers]
    q, k = maps[0].shape[2:]
    asking, words = get_layer_words(recording, layers[0], kind)
    number, places = find_word(query_text, asking if kind == "cross" else words)
    query = number if kind == "cross" else number - max(k - q, 0)
    key = None if kind == "cross" else number  # the key at the query's own position
    if query < 0:
        raise ConfigError(f"token {number} was recorded only as a key: the recorded queries are the last {q} of {k} tokens.")
    rows = [m[0, :, query].mean(0) for m in maps]
    found = sum(rows[1:], rows[0]) / len(rows)
    word = quote_token(strip_markers(asking[query]))
    title = f"what {word}, token {number:,}, attended to: {describe_place(recording, place, kind)}"
    yield from wrap_sentence(title, window.width, "bold")
    if len(places) > 1:
        yield from wrap_sentence(
            f"It occurs {len(places):,} times, and this is the last; select another by its number.", window.width
        )
    heat = make_log_heat(found)
    if k <= MAX_TOKENS:
        yield from limit_lines(
            render_shaded_text(words, found, heat, window, marked=key), show_all, window, k, marked=key is not None
        )
        yield heat.render_legend(window.colors, window.width)
    yield from render_nan_note(found, window.width)
    yield Text()
    yield from render_bars(found, words, key, window, k if show_all else MAX_BARS)


def make_log_heat(values: Tensor) -> Heat:
    """Return a logarithmic heat scale down to a hundredth of the largest value, since most values are small."""
    finite = values[values.isfinite()]
    most = (float(finite.max()) if len(finite) else 0.0) or 1.0
    return Heat(Log(), (PALEST_FRACTION * most, most))


def describe_place(recording: Recording, place: LayerHead | None, attention: str = "self") -> str:
    """Describe the layer and the head, with its kind, for a title."""
    if place is None:
        count = len(recording.layers(attention))
        return f"the mean of all heads of all {count} layers" if count > 1 else "the mean of all heads of the one layer"
    layer, number = place
    if number is None:
        return f"layer {layer}, the mean of its heads"
    known = recording.map(layer, kind=attention).shape[3] <= MAX_TOKENS  # classifying a head traverses its map several times
    rows = classify_heads(recording, HeadOptions(recording.tokens), kind=attention, layers=[layer]) if known else ()
    return f"layer {layer}, head {number}" + next((f": {row.kind}" for row in rows if row.head == number), "")


def render_bars(
    row: Tensor, words: Sequence[str], own: int | None, window: TerminalArea, most: int = MAX_BARS
) -> Iterator[Text]:
    """Generate a line for each of the largest weights (k,): the weight, the word, its position, and a bar of that length.

    `own` is the key at the query's own position, if there is one.
    """
    order = torch.argsort(row, descending=True, stable=True)[:most].tolist()
    order = [key for key in order if row[key] >= MIN_WEIGHT]
    before = WORDS_BEFORE if window.colors else 0  # without color the word would look like those before it
    labels = [format_label(words, key, before, min(WORD_CELLS, window.width // 4)) for key in order]
    places = [format_position(key, own, len(f"{max(order):,}"), window.width >= WIDE_SCREEN) for key in order]
    side, place = max((one.cell_len for one in labels), default=0), max(map(len, places), default=0)
    room = window.width - side - place - 9
    style = Style(color=get_color(BAR_SHADE, window.colors)) if window.colors else Style()
    for key, word, far in zip(order, labels, places, strict=True):
        weight = float(row[key])
        line = Text.assemble(f"{weight:.3f}  ", word, " " * (side - word.cell_len + 2), (far.ljust(place), "dim"))
        if room >= 4:
            line.append(" ").append(format_bar(weight / float(row[order[0]]), room - 1, window.colors), style=style)
        yield line
    rest = float(row.sum() - row[order].sum())
    left = int((row > 0).sum()) - len(order)
    if left:
        yield Text(f"{rest:.3f}  on {left:,} other{'s' * (left > 1)}", style="dim")


def format_label(words: Sequence[str], key: int, count: int, room: int) -> Text:
    """Format a word after as much of the `count` words before it as fits in `room` cells."""
    word = truncate_end(words[key].replace("\n", BREAK).lstrip(" ") or BLANK, room)
    gap = " " * words[key].startswith(" ")
    before = "".join(words[max(key - count, 0) : key]).replace("\n", BREAK).lstrip(" ")
    context = truncate_start(before, room - cell_len(word) - len(gap))
    return Text.assemble((context + gap if context else "", "dim"), (word, "bold"))


def format_position(key: int, own: int | None, width: int, full: bool) -> str:
    """Format the position of a key: its number and its distance from the query; without `full` only the distance."""
    if own is None:
        return f"{key:>{width},}"
    far = own - key
    distance = "itself" if far == 0 else f"{far:,} back" if far > 0 else f"{-far:,} ahead"
    return f"{key:>{width},}, {distance}" if full else distance


def format_bar(share: float, room: int, colours: str | None) -> str:
    """Format a bar to an eighth of a cell, or of # signs where there is no color."""
    if colours is None:
        return "#" * max(round(share * room), 1)
    eighths = max(round(8 * share * room), 1)
    return EIGHTHS[8] * (eighths // 8) + EIGHTHS[eighths % 8].strip()
