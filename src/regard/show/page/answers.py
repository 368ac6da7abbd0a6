"""What is answered at once: each address under /api that is no stream and runs no model, and the heads it needs to know."""

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

PER_WORDS = 5000  # of one answer
Found = list[Any]  # what an answer needs of each head, known when it is made
Needed = list[tuple[Entry, Place]]


class Answer(NamedTuple):
    """How an address is answered: by work, once these heads are known, of each of which `take` is kept for it."""

    work: Callable[[Session, Request, Found], Response]
    needs: Callable[[Session, Request], Needed] = lambda session, request: []
    take: Callable[[Opened], Any] = attrgetter("pyramid")


def start(session: Session, request: Request, found: Found) -> Response:
    """What a page begins with."""
    return json(session.start())


def example(session: Session, request: Request, found: Found) -> Response:
    """The steps of one of the lectures' examples."""
    return json(example_steps(asked.word(request.query_params, "name"), asked.number(request.query_params, "head", 0)))


def words(session: Session, request: Request, found: Found) -> Response:
    """Words along an axis."""
    query = request.query_params
    first, last = asked.number(query, "from", 0), asked.number(query, "to", 2000)
    lists, name = named(session, request).lists(asked.number(query, "b", 0)), asked.word(query, "list", "words")
    if name not in lists:
        raise MissingError(f"there is no list of words {name!r}; there is {', '.join(lists) or 'none'}.")
    if last - first > PER_WORDS:
        raise ConfigError(f"at most {PER_WORDS:,} words are sent at a time, got {first} to {last}.")
    return json({"words": [short(word) for word in lists[name][first:last]]})


def small(session: Session, request: Request, found: Found) -> Response:
    """Small pictures of the heads of a layer."""
    pictures, sampled = thumbs(named(session, request), asked.place(request.query_params))
    return binary(pictures, {"x-sampled": str(int(sampled))})


def tile(session: Session, request: Request, found: Found) -> Response:
    """A tile of a head's picture."""
    query = request.query_params
    level, row, column = (asked.number(query, name) for name in ("level", "row", "column"))
    (pyramid,) = found
    return binary(pyramid.codes(level, row, column, asked.word(query, "how", "mean")))


def cell(session: Session, request: Request, found: Found) -> Response:
    """One weight."""
    query = request.query_params
    return json(numbers.cell(named(session, request), asked.place(query), asked.number(query, "q"), asked.number(query, "k")))


def row(session: Session, request: Request, found: Found) -> Response:
    """What a query looked at."""
    return binary(numbers.codes(*of_row(session, request)))


def column(session: Session, request: Request, found: Found) -> Response:
    """What looked at a key."""
    return binary(numbers.codes(*numbers.column(found, asked.number(request.query_params, "k"))))


def top(session: Session, request: Request, found: Found) -> Response:
    """The largest weights of a row or of a column."""
    query = request.query_params
    rows, columns = named(session, request).words(asked.place(query))
    if "q" in query:
        (weights, _), along = of_row(session, request), columns
    else:
        (weights, _), along = numbers.column(found, asked.number(query, "k")), rows
    return json({"found": numbers.top(weights, along, asked.number(query, "n", 8))})


def of_row(session: Session, request: Request) -> tuple[Tensor, Tensor]:
    """The weights of a row, the mean of some heads, and which are visible."""
    query = request.query_params
    return numbers.row(named(session, request), asked.place(query), asked.number(query, "q"), asked.numbers(query, "heads"))


def steps(session: Session, request: Request, found: Found) -> Response:
    """The steps of a head."""
    query = request.query_params
    q = asked.number(query, "q") if "q" in query else None
    return json(steps_of(named(session, request), asked.place(query), q, STEPS))


def one(session: Session, request: Request) -> Needed:
    """The head of its place."""
    entry, place = named(session, request), asked.place(request.query_params)
    entry.shape(place)
    return [(entry, place)]


def several(session: Session, request: Request) -> Needed:
    """Some heads of its place's layer, to know what each of their rows is divided by."""
    ((entry, place),) = one(session, request)
    return [(entry, other) for other in numbers.places(entry, place, asked.numbers(request.query_params, "heads"))]


def of_axis(session: Session, request: Request) -> Needed:
    """The largest of a column need them, those of a row need nothing."""
    return [] if "q" in request.query_params else several(session, request)


MAP = attrgetter("pyramid.map")  # which is small, and knows what its rows are divided by
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
    """The recording that a request names."""
    return session.entry(request.path_params["id"])


def json(found: Any) -> Response:
    """An answer in JSON."""
    return Response(dumped(found), media_type="application/json")


def binary(codes: Tensor, headers: dict[str, str] | None = None) -> Response:
    """Codes, little-endian, with their shape."""
    shape = ",".join(map(str, codes.shape))
    data = codes.cpu().contiguous().numpy().astype("<u2").tobytes()
    return Response(data, media_type="application/octet-stream", headers={"x-shape": shape, **(headers or {})})
