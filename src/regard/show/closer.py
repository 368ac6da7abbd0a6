"""A recording looked at closer in the terminal: its words by the attention they receive, one head, one row."""

from collections.abc import Iterator

from rich.text import Text
from torch import Tensor

from regard.errors import ConfigError
from regard.observe import Recording
from regard.observe.heads import heads
from regard.show.axes import bare, place_of, words_of
from regard.show.bars import MOST as BARS
from regard.show.bars import bars
from regard.show.heat_map import heat_map, wrapped
from regard.show.scale import Log
from regard.show.shaded import MOST, part, received, shaded
from regard.show.swatches import Heat, Window

DECADES = 0.01  # of the largest value, at which a word is as pale as paper

Place = tuple[int, int | None]  # a layer, and a head of it; None is the mean of all


def placed(asked: str) -> Place:
    """A layer and a head from 3.5, or a layer alone from 3."""
    layer, dot, head = asked.partition(".")
    if not layer.isdecimal() or (dot and not head.isdecimal()):
        raise ConfigError(f"a head is named by its layer and its number, like 3.5, and a layer like 3; got {asked!r}.")
    return int(layer), int(head) if dot else None


def text(recording: Recording, window: Window, whole: bool) -> Iterator[Text]:
    """The words, shaded by how much of all attention they receive."""
    count = recording.map(0).shape[3]
    if not recording.tokens:
        return
    if count > MOST:
        yield from wrapped(
            f"What each word receives is not told of more than {MOST:,} words; --query tells of one.", window.width
        )
        return
    words, values = words_of(recording, 0, count), received(recording)
    heat = logarithmic(values)
    yield from wrapped("how much of all attention, in all heads, each word receives:", window.width)
    yield from part(shaded(words, values, heat, window), whole, window, count)
    yield heat.legend(window.colours, window.width)


def head(recording: Recording, place: Place, window: Window) -> Iterator[Text]:
    """A head as a heat map, or the mean of the heads of a layer."""
    m = recording.map(*place).select(batch=0)
    yield from heat_map(m, words_of(recording, 0, m.shape[3]), named(recording, place), window)


def row(recording: Recording, place: Place | None, asked: str, window: Window, whole: bool) -> Iterator[Text]:
    """What a word looked at: the text shaded by it, and bars. Of a head, or the mean of a layer's, or of all layers'."""
    layers = range(len(recording.layers())) if place is None else [place[0]]
    maps = [recording.map(layer, place[1] if place else None).select(batch=0) for layer in layers]
    q, k = maps[0].shape[2:]
    words = words_of(recording, 0, k)
    key, places = place_of(asked, words)
    query = key - (k - q)
    if query < 0:
        raise ConfigError(f"token {key} was a key and no query: the queries recorded are the last {q} of {k} tokens.")
    found = mean([m[0, :, query].mean(0) for m in maps])
    yield from wrapped(f"what {bare(words[key])!r}, token {key:,}, looked at: {named(recording, place)}", window.width, "bold")
    if len(places) > 1:
        yield from wrapped(f"It stands at {len(places):,} places, and this is the last; any other by its number.", window.width)
    heat = logarithmic(found)
    if k <= MOST:
        yield from part(shaded(words, found, heat, window, marked=key), whole, window, k, marked=True)
        yield heat.legend(window.colours, window.width)
    yield Text()
    yield from bars(found, words, key, window, k if whole else BARS)


def mean(rows: list[Tensor]) -> Tensor:
    """The mean of rows."""
    return sum(rows[1:], rows[0]) / len(rows)


def logarithmic(values: Tensor) -> Heat:
    """Even ratios, down to a hundredth of the largest value: most are small."""
    most = float(values.max()) or 1.0
    return Heat(Log(), (DECADES * most, most))


def named(recording: Recording, place: Place | None) -> str:
    """The layer and the head, with its kind, for a title."""
    if place is None:
        return f"the mean of all heads of all {len(recording.layers())} layers"
    layer, number = place
    if number is None:
        return f"layer {layer}, the mean of its heads"
    known = recording.map(layer).shape[3] <= MOST  # typing a head walks through it several times
    kind = next((f": {row.kind}" for row in heads(recording, layers=[layer]) if row.head == number), "") if known else ""
    return f"layer {layer}, head {number}{kind}"
