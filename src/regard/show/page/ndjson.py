"""Streaming responses: one object per line, sent as it is computed; no thread waits for a client that does not read."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from regard.show.page.executor import DisconnectedError, RequestExecutor, describe_error, get_status, wait_for_disconnect
from regard.show.page.head_pictures import Alive
from regard.show.page.json_encoding import encode_json

MAX_STREAM_SECONDS = 3600.0
Lines = Callable[[Alive], Iterator[dict[str, Any]]]


class StreamLine(NamedTuple):
    """Data to send, whether it is the last, and the status of one that is an error."""

    data: bytes = b""
    last: bool = False
    status: int = 200


class NdjsonResponse(Response):
    """An NDJSON response, an object per line as it is computed; an error is the last line of a stream that failed.

    What fails before its first line is an error response with its status instead. With `is_text` a model writes it.
    """

    media_type = "application/x-ndjson"

    def __init__(self, executor: RequestExecutor, request: Request, lines: Lines, is_text: bool = False) -> None:
        super().__init__(headers={"cache-control": "no-store"})
        self.executor, self.request, self.lines, self.is_text = executor, request, lines, is_text
        del self.headers["content-length"]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        state = self.executor.begin_request(self.is_text)
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[StreamLine]()

        def put_line(line: StreamLine) -> None:
            with suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(queue.put_nowait, line)

        pool = self.executor.writing if self.is_text else self.executor.long
        doing = loop.run_in_executor(pool, run_iterator, self.lines, state.check, put_line)
        leaving: asyncio.Future[Any] = asyncio.ensure_future(wait_for_disconnect(self.request))
        try:
            until, has_begun, line = time.monotonic() + MAX_STREAM_SECONDS, False, StreamLine()
            while not line.last:
                line = await wait_for_line(queue, leaving, until)
                if not has_begun:
                    await send({"type": "http.response.start", "status": line.status, "headers": self.make_headers(line)})
                has_begun = True
                await send({"type": "http.response.body", "body": line.data, "more_body": not line.last})
        except DisconnectedError:
            pass
        finally:
            self.executor.end_request(state)
            leaving.cancel()
            doing.cancel()

    def make_headers(self, first: StreamLine) -> list[tuple[bytes, bytes]]:
        """Return the headers of a response that begins with this line."""
        if first.status != 200:
            self.headers["content-type"] = "application/json"
        return self.raw_headers


async def wait_for_line(queue: "asyncio.Queue[StreamLine]", leaving: "asyncio.Future[Any]", until: float) -> StreamLine:
    """Return the next line, or an error line where the time is up. Raises DisconnectedError where the client has gone."""
    getting: asyncio.Future[StreamLine] = asyncio.ensure_future(queue.get())
    try:
        await asyncio.wait({getting, leaving}, timeout=max(until - time.monotonic(), 0), return_when=asyncio.FIRST_COMPLETED)
        if getting.done():
            return getting.result()
    finally:
        getting.cancel()  # also where the server stops while it waits: a task that is left pending is reported on stderr
    if leaving.done():
        raise DisconnectedError
    return make_failure(504, f"the request takes longer than {MAX_STREAM_SECONDS:.0f} s; request less.")


def make_failure(status: int, sentence: str) -> StreamLine:
    """Make the last line of a stream that failed."""
    return StreamLine(encode_json({"error": sentence}) + b"\n", True, status)


def run_iterator(lines: Lines, alive: Alive, hand: Callable[[StreamLine], None]) -> None:
    """Run an iterator in one thread from beginning to end, since the contexts in it belong to a thread."""
    iterator: Iterator[dict[str, Any]] = iter(())
    try:
        alive()
        for line in (iterator := lines(alive)):
            alive()
            hand(StreamLine(encode_json(line) + b"\n"))
        hand(StreamLine(last=True))
    except (DisconnectedError, asyncio.CancelledError):  # no client to send the error to
        return
    except Exception as error:
        hand(make_failure(get_status(error), describe_error(error)))
    finally:
        getattr(iterator, "close", lambda: None)()
