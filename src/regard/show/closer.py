"""Details of a recording in the terminal: its words by the attention they receive, one head, one row."""

from collections.abc import Iterator

from rich.text import Text
from torch import Tensor

from regard.errors import ConfigError
from regard.observe import Recording
from regard.observe.heads import heads
from regard.show.axes import Sides, bare, place_of, sides_of
from regard.show.bars import MOST as BARS
from regard.show.bars import bars
from regard.show.heat_map import heat_map, wrapped
from regard.show.scale import Log
from regard.show.shaded import MOST, part, received, shaded
from regard.show.swatches import Heat, Window

DECADES = 0.01  # fraction of the largest value that has the palest color

Place = tuple[int, int | None]  # layer and head; head None is the mean of all heads


def placed(asked: str) -> Place:
    """Parse a layer and a head from 3.5, or a layer alone from 3. Raises ConfigError for other text."""
    numbers = asked.split(".")
    if len(numbers) > 2 or not all(one.isdecimal() and len(one) < 10 for one in numbers):
        raise ConfigError(f"a head is named by its layer and its number, like 3.5, and a layer like 3; got {asked!r}.")
    return int(numbers[0]), int(numbers[1]) if len(numbers) == 2 else None


def text(recording: Recording, window: Window, whole: bool, kind: str = "self") -> Iterator[Text]:
    """Generate the words, shaded by their share of all attention."""
    count = recording.map(0, kind=kind).shape[3]
    if not recording.tokens:
        return
    if count > MOST:
        yield from wrapped(
            f"What each word receives is shown for at most {MOST:,} words; --query shows one of them.", window.width
        )
        return
    words, values = words_of(recording, 0, kind)[1], received(recording, kind=kind)
    heat = logarithmic(values)
    yield from wrapped("how much of all attention, in all heads, each word receives:", window.width)
    yield from part(shaded(words, values, heat, window), whole, window, count)
    yield heat.legend(window.colours, window.width)


def words_of(recording: Recording, layer: int, kind: str) -> Sides:
    """Return the words of the queries and of the keys of a layer, or their indices."""
    return sides_of(recording, layer, kind, None, 0, recording.map(layer, kind=kind).shape[2:])


def head(recording: Recording, place: Place, window: Window, kind: str = "self") -> Iterator[Text]:
    """Generate the heat map of a head, or of the mean of the heads of a layer."""
    m = recording.map(*place, kind=kind).select(batch=0)
    asking, answering = words_of(recording, place[0], kind)
    yield from heat_map(m, answering, named(recording, place, kind), window, asking if kind == "cross" else None)


def row(
    recording: Recording, place: Place | None, asked: str, window: Window, whole: bool, kind: str = "self"
) -> Iterator[Text]:
    """Generate what a word attends to, as shaded text and as bars: in one head, or the mean of a layer or of all layers."""
    layers = range(len(recording.layers(kind))) if place is None else [place[0]]
    maps = [recording.map(layer, place[1] if place else None, kind).select(batch=0) for layer in layers]
    q, k = maps[0].shape[2:]
    asking, words = words_of(recording, layers[0], kind)
    number, places = place_of(asked, asking if kind == "cross" else words)
    query = number if kind == "cross" else number - (k - q)
    key = None if kind == "cross" else number  # the key at the query's own position
    if query < 0:
        raise ConfigError(f"token {number} was a key and no query: the queries recorded are the last {q} of {k} tokens.")
    found = mean([m[0, :, query].mean(0) for m in maps])
    said = f"what {bare(asking[query])!r}, token {number:,}, looked at: {named(recording, place, kind)}"
    yield from wrapped(said, window.width, "bold")
    if len(places) > 1:
        yield from wrapped(f"It stands at {len(places):,} places, and this is the last; any other by its number.", window.width)
    heat = logarithmic(found)
    if k <= MOST:
        yield from part(shaded(words, found, heat, window, marked=key), whole, window, k, marked=key is not None)
        yield heat.legend(window.colours, window.width)
    yield Text()
    yield from bars(found, words, key, window, k if whole else BARS)


def mean(rows: list[Tensor]) -> Tensor:
    """Compute the mean of rows."""
    return sum(rows[1:], rows[0]) / len(rows)


def logarithmic(values: Tensor) -> Heat:
    """Return a logarithmic heat scale down to a hundredth of the largest value, since most values are small."""
    most = float(values.max()) or 1.0
    return Heat(Log(), (DECADES * most, most))


def named(recording: Recording, place: Place | None, attention: str = "self") -> str:
    """Describe the layer and the head, with its kind, for a title."""
    if place is None:
        count = len(recording.layers(attention))
        return f"the mean of all heads of all {count} layers" if count > 1 else "the mean of all heads of the one layer"
    layer, number = place
    if number is None:
        return f"layer {layer}, the mean of its heads"
    known = recording.map(layer, kind=attention).shape[3] <= MOST  # classifying a head traverses its map several times
    rows = heads(recording, kind=attention, layers=[layer]) if known else ()
    return f"layer {layer}, head {number}" + next((f": {row.kind}" for row in rows if row.head == number), "")
