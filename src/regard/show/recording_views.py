"""Details of a recording in the terminal: its words by the attention they receive, one head, one row."""

from collections.abc import Iterator

from rich.text import Text
from torch import Tensor

from regard.errors import ConfigError
from regard.observe import Recording
from regard.observe.head_kinds import heads
from regard.show.axis_words import AxisWords, find_word, get_axis_words, strip_markers
from regard.show.bars import MAX_BARS as BARS
from regard.show.bars import render_bars
from regard.show.color_scale import Log
from regard.show.heat_map import render_heat_map, wrap_sentence
from regard.show.shaded_text import MAX_TOKENS, compute_attention_shares, limit_lines, render_shaded_text
from regard.show.terminal_colors import Heat, Window

PALEST_FRACTION = 0.01  # fraction of the largest value that has the palest color

LayerHead = tuple[int, int | None]  # layer and head; head None is the mean of all heads


def parse_layer_head(text: str) -> LayerHead:
    """Parse a layer and a head from 3.5, or a layer alone from 3. Raises ConfigError for other text."""
    numbers = text.split(".")
    if len(numbers) > 2 or not all(one.isdecimal() and len(one) < 10 for one in numbers):
        raise ConfigError(f"a head must be given as layer and number, like 3.5, or a layer like 3; got {text!r}.")
    return int(numbers[0]), int(numbers[1]) if len(numbers) == 2 else None


def render_text(recording: Recording, window: Window, whole: bool, kind: str = "self") -> Iterator[Text]:
    """Generate the words, shaded by their share of all attention."""
    count = recording.map(0, kind=kind).shape[3]
    if not recording.tokens:
        return
    if count > MAX_TOKENS:
        yield from wrap_sentence(
            f"The attention that each word receives is shown for at most {MAX_TOKENS:,} words; --query shows one word.",
            window.width,
        )
        return
    words, values = get_layer_words(recording, 0, kind)[1], compute_attention_shares(recording, kind=kind)
    heat = make_log_heat(values)
    yield from wrap_sentence("the share of all attention, in all heads, that each word receives:", window.width)
    yield from limit_lines(render_shaded_text(words, values, heat, window), whole, window, count)
    yield heat.render_legend(window.colors, window.width)


def get_layer_words(recording: Recording, layer: int, kind: str) -> AxisWords:
    """Return the words of the queries and of the keys of a layer, or their indices."""
    return get_axis_words(recording, layer, kind, None, 0, recording.map(layer, kind=kind).shape[2:])


def render_head(recording: Recording, place: LayerHead, window: Window, kind: str = "self") -> Iterator[Text]:
    """Generate the heat map of a head, or of the mean of the heads of a layer."""
    m = recording.map(*place, kind=kind).select(batch=0)
    asking, answering = get_layer_words(recording, place[0], kind)
    yield from render_heat_map(
        m, answering, describe_place(recording, place, kind), window, asking if kind == "cross" else None
    )


def render_row(
    recording: Recording, place: LayerHead | None, query_text: str, window: Window, whole: bool, kind: str = "self"
) -> Iterator[Text]:
    """Generate what a word attends to, as shaded text and as bars: in one head, or the mean of a layer or of all layers."""
    layers = range(len(recording.layers(kind))) if place is None else [place[0]]
    maps = [recording.map(layer, place[1] if place else None, kind).select(batch=0) for layer in layers]
    q, k = maps[0].shape[2:]
    asking, words = get_layer_words(recording, layers[0], kind)
    number, places = find_word(query_text, asking if kind == "cross" else words)
    query = number if kind == "cross" else number - (k - q)
    key = None if kind == "cross" else number  # the key at the query's own position
    if query < 0:
        raise ConfigError(f"token {number} was recorded only as a key: the recorded queries are the last {q} of {k} tokens.")
    found = average_rows([m[0, :, query].mean(0) for m in maps])
    title = f"what {strip_markers(asking[query])!r}, token {number:,}, attended to: {describe_place(recording, place, kind)}"
    yield from wrap_sentence(title, window.width, "bold")
    if len(places) > 1:
        yield from wrap_sentence(
            f"It occurs {len(places):,} times, and this is the last; select another by its number.", window.width
        )
    heat = make_log_heat(found)
    if k <= MAX_TOKENS:
        yield from limit_lines(
            render_shaded_text(words, found, heat, window, marked=key), whole, window, k, marked=key is not None
        )
        yield heat.render_legend(window.colors, window.width)
    yield Text()
    yield from render_bars(found, words, key, window, k if whole else BARS)


def average_rows(rows: list[Tensor]) -> Tensor:
    """Compute the mean of rows."""
    return sum(rows[1:], rows[0]) / len(rows)


def make_log_heat(values: Tensor) -> Heat:
    """Return a logarithmic heat scale down to a hundredth of the largest value, since most values are small."""
    most = float(values.max()) or 1.0
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
    rows = heads(recording, kind=attention, layers=[layer]) if known else ()
    return f"layer {layer}, head {number}" + next((f": {row.kind}" for row in rows if row.head == number), "")
