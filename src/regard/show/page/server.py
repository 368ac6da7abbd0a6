"""The live page: a recording, or a model and typed text, served to a browser on this machine."""

import errno
import gzip
import secrets
import signal
import socket
import threading
import time
import webbrowser
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, lru_cache, partial
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

from regard.errors import ConfigError, RegardError
from regard.observe import Recording
from regard.observe.head_scores import HeadOptions, UserScore
from regard.show.page import params
from regard.show.page.executor import RequestExecutor, describe_error, get_status, make_error_response
from regard.show.page.handlers import (
    GENERAL_HANDLERS,
    LONG_HANDLERS,
    RECORDING_HANDLERS,
    Handler,
    get_entry,
    make_json_response,
)
from regard.show.page.head_pictures import Alive, load_passes, stream_head
from regard.show.page.head_table import stream_head_table
from regard.show.page.model_adapter import adapt_model
from regard.show.page.ndjson import NdjsonResponse
from regard.show.page.params import MissingError
from regard.show.page.security import HEAD_BYTES, SecurityMiddleware, is_loopback
from regard.show.page.session import GenerationRequest, Session, list_examples
from regard.show.page.startup_loading import StartupLoading
from regard.show.page.timeouts import TimeoutProtocol

STATIC = Path(__file__).parent / "static"
MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml", ".png": "image/png"}
MAX_BODY_BYTES = 2**18
MIN_COMPRESSED_BYTES = 2**10  # bytes
GET, POST = ["GET"], ["POST"]
PATIENCE_SECONDS = 1.0  # for the models, before the page is served without them
FAILURE_SECONDS = 2.0  # for the error of loading to be shown on the page, which asks twice a second, before the server stops


class PageRoutes:
    """The routes of one session."""

    def __init__(self, session: Session) -> None:
        self.session, self.executor = session, RequestExecutor()

    def list_routes(self) -> list[Route]:
        """List all routes."""
        return [
            Route("/", self.serve_file, methods=GET),
            Route("/static/{path:path}", self.serve_file, methods=GET),
            *(Route(f"/api/{name}", self.make_route(answer), methods=GET) for name, answer in GENERAL_HANDLERS.items()),
            Route("/api/type", self.run_model, methods=POST),
            Route("/api/generate", self.stream_generation, methods=POST),
            Route("/api/stop", self.stop_generation, methods=POST),
            Route("/api/translation", self.run_translator, methods=POST),
            Route("/api/gallery", self.open_gallery, methods=POST),
            Route("/api/r/{id}/heads", self.stream_kinds, methods=GET),
            Route("/api/r/{id}/probe", self.stream_probe, methods=GET),
            Route("/api/r/{id}/open", self.open_head, methods=GET),
            Route("/api/r/{id}/examination", self.examine_recording, methods=POST),
            *(
                Route(f"/api/r/{{id}}/{name}", self.make_route(answer), methods=GET)
                for name, answer in RECORDING_HANDLERS.items()
            ),
            *(
                Route(f"/api/r/{{id}}/{name}", self.make_long_route(respond), methods=GET)
                for name, respond in LONG_HANDLERS.items()
            ),
        ]

    def make_route(self, answer: Handler) -> Callable[[Request], Any]:
        """Make the route of a handler that runs at once after the heads it needs are computed."""

        async def respond_quickly(request: Request) -> Response:
            params.check_unique(request.query_params.multi_items())
            heads = [partial(self.session.open_head, *one) for one in answer.list_needed_heads(self.session, request)]

            def run_handler(alive: Alive, found: list[Any]) -> Response:
                return compress_response(request, answer.respond(self.session, request, found))

            return await self.executor.run_request(request, run_handler, heads, answer.select_data)

        return respond_quickly

    def make_long_route(self, respond: Callable[[Session, Request, Alive], Response]) -> Callable[[Request], Any]:
        """Make the route of a handler that may run the model or classify its heads, in a thread for long work."""

        async def respond_slowly(request: Request) -> Response:
            params.check_unique(request.query_params.multi_items())

            def run_handler(alive: Alive, found: list[Any]) -> Response:
                return compress_response(request, respond(self.session, request, alive))

            return await self.executor.run_request(request, run_handler, long=True)

        return respond_slowly

    async def serve_file(self, request: Request) -> Response:
        """Return a file of the page."""
        path = list_static_files().get(request.path_params.get("path", "index.html"))
        if path is None:
            raise MissingError("there is no such file here.")
        data = read_static_file(path, path.stat().st_mtime_ns)
        response = Response(data, media_type=MEDIA_TYPES[path.suffix], headers={"cache-control": "no-cache"})
        return compress_response(request, response, compress_static_file)

    async def stream_kinds(self, request: Request) -> Response:
        """Stream the kind of each head."""
        entry, place = (
            get_entry(self.session, request),
            params.parse_place(params.check_unique(request.query_params.multi_items())),
        )
        entry.get_layers(place)
        return NdjsonResponse(self.executor, request, lambda alive: stream_head_table(entry, place, alive))

    async def stream_probe(self, request: Request) -> Response:
        """Stream what the built-in probe says of each head of the model that read a text."""
        params.check_unique(request.query_params.multi_items())
        entry = get_entry(self.session, request)
        return NdjsonResponse(self.executor, request, lambda alive: self.session.stream_probe(entry, alive))

    async def open_head(self, request: Request) -> Response:
        """Compute a head and stream its progress."""
        entry, place = (
            get_entry(self.session, request),
            params.parse_place(params.check_unique(request.query_params.multi_items())),
        )
        entry.get_shape(place)
        return NdjsonResponse(
            self.executor, request, lambda alive: stream_head(entry, place, self.session.open_head(entry, place), alive)
        )

    async def run_model(self, request: Request) -> Response:
        """Run the model on a text."""
        data = await read_body(request)
        text, model = params.parse_body(data, {"text": str})["text"], params.parse_optional(data, "model", str)
        return await self.respond_with_json(request, lambda alive: self.session.run_text(text, alive, False, model))

    async def run_translator(self, request: Request) -> Response:
        """Run the example's translator."""
        params.parse_body(await read_body(request), {})
        return await self.respond_with_json(request, self.session.get_translation)

    async def open_gallery(self, request: Request) -> Response:
        """Open an item of the gallery."""
        name = params.parse_body(await read_body(request), {"name": str})["name"]
        return await self.respond_with_json(request, lambda alive: self.session.open_gallery(name, alive))

    async def examine_recording(self, request: Request) -> Response:
        """Examine the model on the text of a recording."""
        sees, name = params.parse_body(await read_body(request), {"sees": str})["sees"], request.path_params["id"]
        return await self.respond_with_json(request, lambda alive: self.session.examine_recording(name, sees, alive))

    async def respond_with_json(self, request: Request, compute: Callable[[Alive], dict[str, Any]]) -> Response:
        """Respond with what a function that may run a model returns."""

        def respond(alive: Alive, found: list[Any]) -> Response:
            return compress_response(request, make_json_response(compute(alive)))

        return await self.executor.run_request(request, respond, long=True)

    async def stream_generation(self, request: Request) -> Response:
        """Stream the text that the model generates."""
        kinds: dict[str, type | tuple[type, ...]] = {"text": str, "tokens": int, "temperature": (int, float)}
        data = await read_body(request)
        found = params.parse_body(data, kinds)
        asked = GenerationRequest(
            found["text"],
            found["tokens"],
            params.check_temperature(found["temperature"]),
            params.parse_optional(data, "seed", int),
            params.parse_optional(data, "model", str),
            bool(params.parse_optional(data, "chat", int)),
            params.parse_optional(data, "run", str),
        )

        def generate_lines(alive: Alive) -> Iterator[dict[str, Any]]:
            return self.session.generate_text(asked, alive)

        return NdjsonResponse(self.executor, request, generate_lines)

    async def stop_generation(self, request: Request) -> Response:
        """End a text after the word that is written now; the stream ends with its recording, as that of a complete text."""
        run = params.parse_body(await read_body(request), {"run": str})["run"]
        return make_json_response({"stopped": self.session.runs.stop(run)})


@cache
def list_static_files() -> dict[str, Path]:
    """Map the name of each file of the page to its path."""
    return {path.relative_to(STATIC).as_posix(): path for path in STATIC.rglob("*") if path.suffix in MEDIA_TYPES}


@lru_cache(256)
def read_static_file(path: Path, modified_ns: int) -> bytes:
    """Read a file of the page, once as long as it is not changed: a page loads some 70 of them."""
    return path.read_bytes()


@lru_cache(256)
def compress_static_file(data: bytes) -> bytes:
    """Compress a file of the page, once."""
    return gzip.compress(data, 9, mtime=0)


async def read_body(request: Request) -> bytes:
    """Read the body of a request. Raises HTTPException where it is not JSON, too large or incomplete."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise HTTPException(415, "the request must be JSON: Content-Type: application/json.")
    found = bytearray()
    try:
        async for part in request.stream():
            found += part
            if len(found) > MAX_BODY_BYTES:
                raise HTTPException(413, f"the request may have at most {MAX_BODY_BYTES:,} bytes.")
    except ClientDisconnect:
        raise HTTPException(400, "the request was not sent completely; send it again.") from None
    return bytes(found)


def compress_response(request: Request, response: Response, compress: Callable[[bytes], bytes] | None = None) -> Response:
    """Compress a response where the client accepts it and it is worth it; only the client's own page may keep it."""
    response.headers.setdefault("cache-control", "no-store")
    if len(response.body) >= MIN_COMPRESSED_BYTES and "gzip" in request.headers.get("accept-encoding", ""):
        quick = response.media_type == "application/octet-stream"  # codes: speed matters more for a tile than the last percent
        body = bytes(response.body)
        response.body = compress(body) if compress else gzip.compress(body, 1 if quick else 5, mtime=0)
        response.headers["content-length"] = str(len(response.body))
        response.headers["content-encoding"] = "gzip"
        response.headers["vary"] = "accept-encoding"
    return response


async def handle_error(request: Request, error: Exception) -> Response:
    """Convert any error to a response of one sentence."""
    if isinstance(error, HTTPException):
        sentences = {404: "there is nothing at this address.", 405: f"{request.method[:20]} is not allowed at this address."}
        detail = str(error.detail)
        response = make_error_response(error.status_code, sentences.get(error.status_code, detail))
        response.headers.update(error.headers or {})  # the allowed methods, where one is not
        return response
    return make_error_response(get_status(error), describe_error(error))


def make_application(page: PageRoutes, token: str | None = None) -> SecurityMiddleware:
    """Make the ASGI application of a page."""
    handlers = {HTTPException: handle_error, RegardError: handle_error, Exception: handle_error}
    inner = Starlette(routes=page.list_routes(), exception_handlers=handlers)
    inner.router.redirect_slashes = False
    return SecurityMiddleware(inner, make_error_response, token)


class UvicornServer(uvicorn.Server):
    """uvicorn's server, which calls `ready` once it listens, and does not re-raise Ctrl-C and SIGTERM after shutdown."""

    ready: Callable[[], None] = staticmethod(lambda: None)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening."""
        await super().startup(sockets)
        self.ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Shut down, and cancel the active requests."""
        for task in self.server_state.tasks:
            task.cancel()
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle both signals in a context, in the main thread only, where they arrive."""
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
    """A page that is being served: it has an address, and stops by a signal, by `stop`, or at the end of a with statement."""

    def __init__(self, session: Session, host: str = "127.0.0.1", port: int = 0) -> None:
        self._socket = bind_socket(host, port)
        own = is_loopback(host) and is_loopback(self._socket.getsockname()[0])  # localhost is what /etc/hosts says it is
        self.token = None if own else secrets.token_urlsafe(16)
        self.page = PageRoutes(session)
        config = uvicorn.Config(
            make_application(self.page, self.token),
            http=TimeoutProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",  # uvicorn's own log; the sender of a refused request gets the reason
            access_log=False,
            server_header=False,
            h11_max_incomplete_event_size=HEAD_BYTES,
            timeout_graceful_shutdown=2,
        )
        self._server = UvicornServer(config)
        self._loading: StartupLoading | None = None
        self._thread: threading.Thread | None = None
        shown = socket.gethostname() if host in ("", "0.0.0.0", "::") else host
        shown = f"[{shown}]" if ":" in shown else shown
        self.address = f"http://{shown}:{self._socket.getsockname()[1]}/" + (f"?token={self.token}" if self.token else "")

    def load_models(self, loading: StartupLoading, use: Callable[[Sequence[Any]], None]) -> None:
        """Load models and pass them to `use`, in a thread if it takes long. Raises the error of loading, later `run` does."""
        self._loading, self.page.session.loading = loading, loading.describe
        loading.start(use, self.end_loading)
        loading.wait(PATIENCE_SECONDS)

    def end_loading(self) -> None:
        """Show the page, now that the models are loaded; stop the server if that failed, once the page could show it."""
        try:
            self.check_loading()
            self.page.session.loading = None
        except BaseException:  # raised by load_models or run
            if self._server.started:
                time.sleep(FAILURE_SECONDS)
            self._server.should_exit = True

    def check_loading(self) -> None:
        """Raise the error of loading, if there was one."""
        if self._loading is not None:
            self._loading.wait(0)

    def is_loading(self) -> bool:
        """Return whether models are still loaded."""
        return self._loading is not None and self._loading.is_running()

    def announce(self, open_browser: bool = False) -> None:
        """Print the address, and open it in a browser if `open_browser`."""
        print(f"{self.address}\nPress Ctrl-C to stop.", flush=True)
        threading.Thread(target=self.prepare_opening, name="regard-opening", daemon=False).start()
        if open_browser:  # a browser in the terminal blocks its thread until it is closed
            threading.Thread(target=self.open_address, name="regard-browser", daemon=True).start()

    def prepare_opening(self) -> None:
        """Compute what the page opens on until the server stops; what is wrong is said when a visitor asks."""
        with suppress(InterruptedError, RegardError):
            while self.is_loading():
                self.check_running()
                time.sleep(0.1)
            self.page.session.prepare_opening(self.check_running)

    def check_running(self) -> None:
        """Raise InterruptedError once the server stops."""
        if self._server.should_exit:
            raise InterruptedError

    def open_address(self) -> None:
        """Open the address in a browser."""
        if not webbrowser.open(self.address):
            print("No browser could be opened; open the address above.", flush=True)

    def run(self, ready: Callable[[], None] = lambda: None) -> None:
        """Serve until Ctrl-C, or until the process receives SIGTERM; `ready` is called once the server listens.

        Raises the error of loading the models, if they are loaded meanwhile.
        """
        self._server.ready = ready
        # a daemon, the default if the current thread is one, would abort the process when stopped inside torch
        threading.Thread(target=preload_modules, name="regard-warm", daemon=False).start()
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self.page.executor.close()
        self.check_loading()

    def start(self) -> "Server":
        """Serve in a thread of its own."""
        self._thread = threading.Thread(target=self.run, name="regard-server", daemon=True)
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            self._thread.join(0.01)
        return self

    def stop(self) -> None:
        """Stop the thread, and cancel the active requests."""
        self._server.should_exit = True
        if self._thread is not None:
            self._thread.join()
        self._socket.close()

    def __enter__(self) -> "Server":
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()


def preload_modules() -> None:
    """Load what takes a second the first time, while the browser starts."""
    list_examples()
    load_passes()


def bind_socket(host: str, port: int) -> socket.socket:
    """Bind a socket to an address. Raises ConfigError where that fails."""
    with ExitStack() as undo:
        try:
            wanted = {"type": socket.SOCK_STREAM, "proto": socket.IPPROTO_TCP, "flags": socket.AI_PASSIVE}
            (family, kind, protocol, _, address), *_ = socket.getaddrinfo(host, port, **wanted)
            found = undo.enter_context(socket.socket(family, kind, protocol))  # asyncio then sets TCP_NODELAY
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(address)
        except (OSError, OverflowError) as error:
            shown = f"{host or 'any address'}, port {port},"
            if getattr(error, "errno", None) == errno.EADDRINUSE:
                raise ConfigError(
                    f"{shown} is in use by another program: choose another port, or leave it out to use a free one."
                ) from None
            raise ConfigError(f"{shown} cannot be used: {getattr(error, 'strerror', None) or error}.") from None
        undo.pop_all()
        return found


def make_server(
    subject: Any = None,
    *,
    text: str | None = None,
    adapter: Any = None,
    host: str = "127.0.0.1",
    port: int = 0,
    scores: Sequence[UserScore] = (),
    others: Sequence[Any] = (),
    loading: StartupLoading | None = None,
) -> Server:
    """Make the server of a recording, of a model, or of both; the model reads `text` first where it is given.

    others are more models, among which the page has a choice; `loading` loads all of them, while the page says how far it is.
    scores are functions of an AttentionMap that the table of the heads shows beside its own, as regard.heads takes them.
    Runs by run(), until a signal ends it, or in a thread of its own, in a with statement. Raises ConfigError without recording
    and model, and for a score that is not a function with a docstring.
    """
    recording = subject if isinstance(subject, Recording) else None
    model = adapter if recording is not None or subject is None else subject
    if recording is None and model is None and loading is None:
        raise ConfigError("a page needs a recording or a model: give one of them.")
    HeadOptions(scores=scores).check()
    session = Session(recording, version=version("regard"), scores=scores)

    def use_models(models: Sequence[Any]) -> None:
        session.add_models([adapt_model(one) for one in models])
        if text is not None:
            session.run_text(text, lambda: None)

    if loading is None:
        use_models([one for one in (model, *others) if one is not None])
    server = Server(session, host, port)
    if loading is not None:
        try:
            server.load_models(loading, use_models)
        except BaseException:
            server.stop()
            raise
    return server
