"""The addresses that the page requests, as an ASGI application: its files, and the answers of a session."""

import gzip
from collections.abc import Callable, Iterator
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from regard.errors import RegardError
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
from regard.show.page.head_pictures import Alive, stream_head
from regard.show.page.head_table import stream_head_table
from regard.show.page.ndjson import NdjsonResponse
from regard.show.page.params import MissingError
from regard.show.page.security import SecurityMiddleware
from regard.show.page.session import GenerationRequest, Session

STATIC = Path(__file__).parent / "static"
MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml", ".png": "image/png"}
MAX_BODY_BYTES = 2**18
MIN_COMPRESSED_BYTES = 2**10  # bytes
GET, POST = ["GET"], ["POST"]


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

        return NdjsonResponse(self.executor, request, generate_lines, is_text=True)

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
