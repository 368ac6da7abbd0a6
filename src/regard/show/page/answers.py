"""Handlers of the addresses under /api that neither stream nor run a model, and the heads they need."""

from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from torch import Tensor

from regard.errors import ConfigError
from regard.show.page import asked, numbers
from regard.show.page.asked import MissingError
from regard.show.page.encoding import dumped
from regard.show.page.entry import Entry, Place, short
from regard.show.page.pictures import Opened, thumbs
from regard.show.page.session import STEPS, Session
from regard.show.page.steps import example_steps, steps_of

PER_WORDS = 5000  # maximum words of one answer
Found = list[Any]  # what a handler needs of each head, computed before it runs
Needed = list[tuple[Entry, Place]]


class Answer(NamedTuple):
    """The handler of an address: `work` runs once the heads of `needs` are computed; `take` selects what is passed of each."""

    work: Callable[[Session, Request, Found], Response]
    needs: Callable[[Session, Request], Needed] = lambda session, request: []
    take: Callable[[Opened], Any] = attrgetter("pyramid")


def start(session: Session, request: Request, found: Found) -> Response:
    """Return the initial state of the page."""
    return json(session.start())


def example(session: Session, request: Request, found: Found) -> Response:
    """Return the steps of one of the lectures' examples."""
    return json(example_steps(asked.word(request.query_params, "name"), asked.number(request.query_params, "head", 0)))


def words(session: Session, request: Request, found: Found) -> Response:
    """Return words along an axis."""
    query = request.query_params
    first, last = asked.number(query, "from", 0), asked.number(query, "to", 2000)
    lists, name = named(session, request).lists(asked.number(query, "b", 0)), asked.word(query, "list", "words")
    if name not in lists:
        raise MissingError(f"there is no list of words {name!r}; there is {', '.join(lists) or 'none'}.")
    if last - first > PER_WORDS:
        raise ConfigError(f"at most {PER_WORDS:,} words are sent at a time, got {first} to {last}.")
    return json({"words": [short(word) for word in lists[name][first:last]]})


def small(session: Session, request: Request, found: Found) -> Response:
    """Return small pictures of the heads of a layer."""
    pictures, sampled = thumbs(named(session, request), asked.place(request.query_params))
    return binary(pictures, {"x-sampled": str(int(sampled))})


def tile(session: Session, request: Request, found: Found) -> Response:
    """Return a tile of a head's picture."""
    query = request.query_params
    level, row, column = (asked.number(query, name) for name in ("level", "row", "column"))
    (pyramid,) = found
    return binary(pyramid.codes(level, row, column, asked.word(query, "how", "mean")))


def cell(session: Session, request: Request, found: Found) -> Response:
    """Return one weight."""
    query = request.query_params
    return json(numbers.cell(named(session, request), asked.place(query), asked.number(query, "q"), asked.number(query, "k")))


def row(session: Session, request: Request, found: Found) -> Response:
    """Return the weights of a query."""
    return binary(numbers.codes(*of_row(session, request)))


def column(session: Session, request: Request, found: Found) -> Response:
    """Return the weights on a key."""
    return binary(numbers.codes(*numbers.column(found, asked.number(request.query_params, "k"))))


def top(session: Session, request: Request, found: Found) -> Response:
    """Return the largest weights of a row or of a column."""
    query = request.query_params
    rows, columns = named(session, request).words(asked.place(query))
    if "q" in query:
        (weights, _), along = of_row(session, request), columns
    else:
        (weights, _), along = numbers.column(found, asked.number(query, "k")), rows
    return json({"found": numbers.top(weights, along, asked.number(query, "n", 8))})


def of_row(session: Session, request: Request) -> tuple[Tensor, Tensor]:
    """Compute the weights of a row, the mean of some heads, and which of them are visible."""
    query = request.query_params
    return numbers.row(named(session, request), asked.place(query), asked.number(query, "q"), asked.numbers(query, "heads"))


def steps(session: Session, request: Request, found: Found) -> Response:
    """Return the steps of a head."""
    query = request.query_params
    q = asked.number(query, "q") if "q" in query else None
    return json(steps_of(named(session, request), asked.place(query), q, STEPS))


def one(session: Session, request: Request) -> Needed:
    """Return the requested head as the only one needed."""
    entry, place = named(session, request), asked.place(request.query_params)
    entry.shape(place)
    return [(entry, place)]


def several(session: Session, request: Request) -> Needed:
    """Return the requested heads of a layer, whose row denominators are needed."""
    ((entry, place),) = one(session, request)
    return [(entry, other) for other in numbers.places(entry, place, asked.numbers(request.query_params, "heads"))]


def of_axis(session: Session, request: Request) -> Needed:
    """Return the heads needed for the largest weights: those requested for a column, none for a row."""
    return [] if "q" in request.query_params else several(session, request)


MAP = attrgetter("pyramid.map")  # small, with the denominators of its rows
GENERAL = {"start": Answer(start), "example": Answer(example)}
OF_RECORDING = {
    "words": Answer(words),
    "thumbs": Answer(small),
    "tile": Answer(tile, one),
    "cell": Answer(cell),
    "row": Answer(row),
    "column": Answer(column, several, MAP),
    "top": Answer(top, of_axis, MAP),
    "steps": Answer(steps),
}


def named(session: Session, request: Request) -> Entry:
    """Return the recording that a request names."""
    return session.entry(request.path_params["id"])


def json(found: Any) -> Response:
    """Make a JSON response."""
    return Response(dumped(found), media_type="application/json")


def binary(codes: Tensor, headers: dict[str, str] | None = None) -> Response:
    """Make a response of little-endian 16-bit codes, with their shape in a header."""
    shape = ",".join(map(str, codes.shape))
    data = codes.cpu().contiguous().numpy().astype("<u2").tobytes()
    return Response(data, media_type="application/octet-stream", headers={"x-shape": shape, **(headers or {})})
