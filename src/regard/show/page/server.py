"""The live page: a recording, or a model and what is typed, served to a browser on this machine."""

import gzip
import secrets
import signal
import socket
import threading
import webbrowser
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from torch import Tensor

from regard.errors import ConfigError, RegardError
from regard.observe import Recording
from regard.show.page import asked, numbers
from regard.show.page.answers import dumped
from regard.show.page.asked import MissingError
from regard.show.page.desk import Desk, Lines, refusal, status_of, told
from regard.show.page.entry import Entry, Place, short
from regard.show.page.guard import HEAD_BYTES, Guard, is_loopback
from regard.show.page.kinds import typing
from regard.show.page.patience import PatientProtocol
from regard.show.page.pictures import Alive, opening, thumbs, warm
from regard.show.page.session import STEPS, Session, examples
from regard.show.page.speaker import speaker_of
from regard.show.page.steps import example_steps, steps_of

STATIC = Path(__file__).parent / "static"
MEDIA = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml", ".png": "image/png"}
CONNECTIONS = 256
BODY_BYTES = 2**18
WORTH_PACKING = 2**10  # bytes
PER_WORDS = 20_000  # of one answer
GET, POST = ["GET"], ["POST"]
Work = Callable[["Page", Request], Response]
Needs = Callable[["Page", Request], list[tuple[Entry, Place]]]


class Page:
    """The routes of one session."""

    def __init__(self, session: Session) -> None:
        self.session, self.desk = session, Desk()

    def routes(self) -> list[Route]:
        """Every address there is."""
        looked = {name: self.quick(work, NEEDS.get(name, nothing)) for name, work in ANSWERS.items()}
        return [
            Route("/", self.static, methods=GET),
            Route("/static/{path:path}", self.static, methods=GET),
            Route("/api/start", self.quick(start, nothing), methods=GET),
            Route("/api/example", self.quick(example, nothing), methods=GET),
            Route("/api/type", self.type, methods=POST),
            Route("/api/generate", self.generate, methods=POST),
            Route("/api/r/{id}/heads", self.heads, methods=GET),
            Route("/api/r/{id}/open", self.open, methods=GET),
            *(Route(f"/api/r/{{id}}/{name}", work, methods=GET) for name, work in looked.items()),
        ]

    def quick(self, work: Work, needs: Needs) -> Callable[[Request], Any]:
        """The route of something that is answered at once, when the heads it needs are known."""

        async def route(request: Request) -> Response:
            places = needs(self, request)
            heads = [partial(self.session.opened, *one) for one in places]
            return packed(request, await self.desk.answer(request, lambda alive: work(self, request), heads))

        return route

    async def static(self, request: Request) -> Response:
        """A file of the page."""
        name = request.path_params.get("path", "index.html")
        known = {path.relative_to(STATIC).as_posix(): path for path in STATIC.rglob("*") if path.suffix in MEDIA}
        if name not in known:
            raise MissingError("there is no such file here.")
        data, media = known[name].read_bytes(), MEDIA[known[name].suffix]
        return packed(request, Response(data, media_type=media, headers={"cache-control": "no-cache"}))

    async def heads(self, request: Request) -> Response:
        """What kind each head is."""
        entry, place = self.entry(request), asked.place(request.query_params)
        entry.attention(place)
        return Lines(self.desk, request, lambda alive: typing(entry, place, alive))

    async def open(self, request: Request) -> Response:
        """Goes over a head."""
        entry, place = self.entry(request), asked.place(request.query_params)
        entry.shape(place)
        return Lines(self.desk, request, lambda alive: opening(entry, place, self.session.opened(entry, place), alive))

    async def type(self, request: Request) -> Response:
        """Runs the model."""
        text = asked.body(await read(request), {"text": str})["text"]

        def work(alive: Alive) -> Response:
            return json(self.session.type(text, alive))

        return packed(request, await self.desk.answer(request, work, long=True))

    async def generate(self, request: Request) -> Response:
        """Lets the model write."""
        kinds: dict[str, type | tuple[type, ...]] = {"text": str, "tokens": int, "temperature": (int, float)}
        data = await read(request)
        found = asked.body(data, kinds)
        seed = asked.seed(data)
        self.session.running(found["text"])

        def lines(alive: Alive) -> Iterator[dict[str, Any]]:
            return self.session.write(found["text"], found["tokens"], float(found["temperature"]), seed, alive)

        return Lines(self.desk, request, lines)

    def entry(self, request: Request) -> Entry:
        """The recording that a request names."""
        return self.session.entry(request.path_params["id"])


def start(page: Page, request: Request) -> Response:
    """What a page begins with."""
    return json(page.session.start())


def example(page: Page, request: Request) -> Response:
    """The steps of one of the lectures' examples."""
    return json(example_steps(asked.word(request.query_params, "name"), asked.number(request.query_params, "head", 0)))


def words(page: Page, request: Request) -> Response:
    """Words along an axis."""
    query = request.query_params
    first, last = asked.number(query, "from", 0), asked.number(query, "to", 2000)
    lists, name = page.entry(request).lists(asked.number(query, "b", 0)), asked.word(query, "list", "words")
    if name not in lists:
        raise MissingError(f"there is no list of words {name!r}; there is {', '.join(lists) or 'none'}.")
    if last - first > PER_WORDS:
        raise ConfigError(f"at most {PER_WORDS:,} words are sent at a time, got {first} to {last}.")
    return json({"words": [short(word) for word in lists[name][first:last]]})


def small(page: Page, request: Request) -> Response:
    """Small pictures of the heads of a layer."""
    found, sampled = thumbs(page.entry(request).layer(asked.place(request.query_params)))
    return binary(found, {"x-sampled": str(int(sampled))})


def tile(page: Page, request: Request) -> Response:
    """A tile of a head's picture."""
    query, place = request.query_params, asked.place(request.query_params)
    level, row, column = (asked.number(query, name) for name in ("level", "row", "column"))
    pyramid = page.session.opened(page.entry(request), place).pyramid
    return binary(pyramid.codes(level, row, column, asked.word(query, "how", "mean")))  # type: ignore[arg-type]


def cell(page: Page, request: Request) -> Response:
    """One weight."""
    query = request.query_params
    return json(numbers.cell(page.entry(request), asked.place(query), asked.number(query, "q"), asked.number(query, "k")))


def row(page: Page, request: Request) -> Response:
    """What a query looked at."""
    return binary(numbers.codes(*along(page, request, "q")))


def column(page: Page, request: Request) -> Response:
    """What looked at a key."""
    return binary(numbers.codes(*along(page, request, "k")))


def top(page: Page, request: Request) -> Response:
    """The largest weights of a row or of a column."""
    query = request.query_params
    axis = "q" if "q" in query else "k"
    rows, columns = page.entry(request).words(asked.place(query))
    weights, _ = along(page, request, axis)
    return json({"found": numbers.top(weights, columns if axis == "q" else rows, asked.number(query, "n", 8))})


def along(page: Page, request: Request, axis: str) -> tuple[Tensor, Tensor]:
    """The weights of a row (q) or a column (k), the mean of some heads, and which are visible."""
    entry, place, query = page.entry(request), asked.place(request.query_params), request.query_params
    heads, index = asked.numbers(query, "heads"), asked.number(query, axis)
    if axis == "q":
        return numbers.row(entry, place, index, heads)
    return numbers.column(entry, place, index, heads)


def steps(page: Page, request: Request) -> Response:
    """The steps of a head."""
    query = request.query_params
    q = asked.number(query, "q") if "q" in query else None
    return json(steps_of(page.entry(request), asked.place(query), q, STEPS))


def nothing(page: Page, request: Request) -> list[tuple[Entry, Place]]:
    """What needs no head to be known."""
    return []


def one(page: Page, request: Request) -> list[tuple[Entry, Place]]:
    """What needs the head of its place."""
    entry, place = page.entry(request), asked.place(request.query_params)
    entry.shape(place)
    return [(entry, place)]


def several(page: Page, request: Request) -> list[tuple[Entry, Place]]:
    """What needs some heads, to know what each of their rows is divided by."""
    ((entry, place),) = one(page, request)
    return [(entry, other) for other in numbers.places(entry, place, asked.numbers(request.query_params, "heads"))]


def of_axis(page: Page, request: Request) -> list[tuple[Entry, Place]]:
    """The largest of a column needs them, those of a row need nothing."""
    return nothing(page, request) if "q" in request.query_params else several(page, request)


NEEDS: dict[str, Needs] = {"tile": one, "column": several, "top": of_axis}
ANSWERS: dict[str, Work] = {
    "words": words,
    "thumbs": small,
    "tile": tile,
    "cell": cell,
    "row": row,
    "column": column,
    "top": top,
    "steps": steps,
}


async def read(request: Request) -> bytes:
    """The body of a request, of JSON and not too large."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise HTTPException(415, "the request must be JSON: Content-Type: application/json.")
    found = bytearray()
    try:
        async for part in request.stream():
            found += part
            if len(found) > BODY_BYTES:
                raise HTTPException(413, f"the request may have at most {BODY_BYTES:,} bytes.")
    except ClientDisconnect:
        raise HTTPException(400, "the request was not sent to its end.") from None
    return bytes(found)


def json(found: Any) -> Response:
    """An answer in JSON."""
    return Response(dumped(found), media_type="application/json")


def binary(codes: Tensor, headers: dict[str, str] | None = None) -> Response:
    """Codes, little-endian, with their shape."""
    shape = ",".join(map(str, codes.shape))
    data = codes.contiguous().numpy().astype("<u2").tobytes()
    return Response(data, media_type="application/octet-stream", headers={"x-shape": shape, **(headers or {})})


def packed(request: Request, response: Response) -> Response:
    """The answer, smaller where the client can unpack it and it is worth it; kept by nobody but the client's own page."""
    response.headers.setdefault("cache-control", "no-store")
    small = len(response.body) < WORTH_PACKING or response.media_type == "application/octet-stream"
    if not small and "gzip" in request.headers.get("accept-encoding", ""):
        response.body = gzip.compress(response.body, 5, mtime=0)
        response.headers["content-length"] = str(len(response.body))
        response.headers["content-encoding"] = "gzip"
        response.headers["vary"] = "accept-encoding"
    return response


async def failed(request: Request, error: Exception) -> Response:
    """Any error as one sentence."""
    if isinstance(error, HTTPException):
        sentences = {404: "there is nothing at this address.", 405: f"{request.method[:20]} is not understood at this address."}
        detail = str(error.detail)
        return refusal(error.status_code, sentences.get(error.status_code, detail))
    return refusal(status_of(error), told(error))


def application(page: Page, token: str | None = None) -> Guard:
    """The whole application of a page."""
    handlers = {HTTPException: failed, RegardError: failed, Exception: failed}
    inner = Starlette(routes=page.routes(), exception_handlers=handlers)
    inner.router.redirect_slashes = False
    return Guard(inner, refusal, token)


class Quiet(uvicorn.Server):
    """uvicorn's server, which says when it is there, and does not pass Ctrl-C and SIGTERM on when it has ended at them."""

    ready: Callable[[], None] = staticmethod(lambda: None)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begins to listen."""
        await super().startup(sockets)
        self.ready()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """A context in which both signals are taken, in the main thread, where they come."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {one: signal.signal(one, self.handle_exit) for one in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for one, handler in before.items():
                signal.signal(one, handler)


class Server:
    """A page that is being served; it has an address, and stops when it is told to, or at the end of a with statement."""

    def __init__(self, session: Session, host: str = "127.0.0.1", port: int = 0) -> None:
        self.token = None if is_loopback(host) else secrets.token_urlsafe(16)
        self._socket = bound(host, port)
        self.page = Page(session)
        config = uvicorn.Config(
            application(self.page, self.token),
            http=PatientProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",  # of its own: what requests are refused for is told to those who sent them
            access_log=False,
            server_header=False,
            limit_concurrency=CONNECTIONS,
            h11_max_incomplete_event_size=HEAD_BYTES,
            timeout_graceful_shutdown=2,
        )
        self._server = Quiet(config)
        self._thread: threading.Thread | None = None
        shown = socket.gethostname() if host in ("", "0.0.0.0", "::") else host
        shown = f"[{shown}]" if ":" in shown else shown
        self.address = f"http://{shown}:{self._socket.getsockname()[1]}/" + (f"?token={self.token}" if self.token else "")

    def announce(self, open_browser: bool = False) -> None:
        """Prints the address, and opens it in a browser where that is asked."""
        print(f"{self.address}\nCtrl-C ends it.", flush=True)
        if open_browser and not webbrowser.open(self.address):
            print("There is no browser to open here; the address is above.", flush=True)

    def run(self, ready: Callable[[], None] = lambda: None) -> None:
        """Serves until Ctrl-C, or until the process is told to end; ready is called once it does."""
        self._server.ready = ready
        threading.Thread(target=begin, name="regard-warm", daemon=True).start()
        self._server.run(sockets=[self._socket])

    def start(self) -> "Server":
        """Serves in a thread of its own."""
        self._thread = threading.Thread(target=self.run, name="regard-server", daemon=True)
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            self._thread.join(0.01)
        return self

    def stop(self) -> None:
        """Ends the thread, and what is being answered in it."""
        self._server.should_exit = True
        if self._thread is not None:
            self._thread.join()
        self._socket.close()

    def __enter__(self) -> "Server":
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()


def begin() -> None:
    """Loads what takes a second the first time, while a browser is still on its way."""
    examples()
    warm()


def bound(host: str, port: int) -> socket.socket:
    """A socket at an address."""
    with ExitStack() as undo:
        try:
            wanted = {"type": socket.SOCK_STREAM, "proto": socket.IPPROTO_TCP, "flags": socket.AI_PASSIVE}
            (family, kind, protocol, _, address), *_ = socket.getaddrinfo(host, port, **wanted)
            found = undo.enter_context(socket.socket(family, kind, protocol))  # one of TCP by name, which asyncio never delays
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(address)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"{host or 'any address'}, port {port}, cannot be listened at: {error}.") from None
        undo.pop_all()
        return found


def server(
    subject: Any = None, *, text: str | None = None, speaker: Any = None, host: str = "127.0.0.1", port: int = 0
) -> Server:
    """The server of a recording or of a model, or of both; the model reads a text first where there is one.

    It runs with run(), until it is told to end, or in a thread of its own, in a with statement.
    """
    recording = subject if isinstance(subject, Recording) else None
    model = speaker if recording is not None or subject is None else subject
    if recording is None and model is None:
        raise ConfigError("a page shows a recording, or runs a model: give one of them.")
    session = Session(recording, None if model is None else speaker_of(model), version("regard"))
    if text is not None:
        session.type(text, lambda: None)
    return Server(session, host, port)
