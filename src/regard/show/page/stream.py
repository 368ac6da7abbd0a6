"""Streaming responses: one object per line, sent as it is computed, as long as the client reads."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from regard.show.page.desk import Desk, GoneError, alive_until, left, status_of, told
from regard.show.page.encoding import dumped
from regard.show.page.pictures import Alive

AHEAD = 16  # maximum lines buffered for a client
STREAM_SECONDS = 3600.0


class Line(NamedTuple):
    """Data to send, whether it is the last, and the status of one that is an error."""

    data: bytes = b""
    last: bool = False
    status: int = 200


class Lines(Response):
    """An NDJSON response, an object per line as it is computed; an error is the last line of a stream that failed.

    What fails before its first line is an error response with its status instead.
    """

    media_type = "application/x-ndjson"

    def __init__(self, desk: Desk, request: Request, lines: Callable[[Alive], Iterator[dict[str, Any]]]) -> None:
        super().__init__(headers={"cache-control": "no-store"})
        self.desk, self.request, self.lines = desk, request, lines
        del self.headers["content-length"]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.desk.enter()
        stop, room = threading.Event(), threading.Semaphore(AHEAD)
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[Line]()
        alive = alive_until(stop)

        def hand(line: Line) -> None:
            alive()
            while not room.acquire(timeout=0.1):
                alive()
            try:
                loop.call_soon_threadsafe(queue.put_nowait, line)
            except RuntimeError:  # the event loop is closed
                raise GoneError from None

        doing = loop.run_in_executor(self.desk.long, worked, self.lines, alive, hand)
        leaving: asyncio.Future[Any] = asyncio.ensure_future(left(self.request))
        try:
            until, begun, line = time.monotonic() + STREAM_SECONDS, False, Line()
            while not line.last:
                line = await coming(queue, leaving, until)
                if not begun:
                    await send({"type": "http.response.start", "status": line.status, "headers": self.head(line)})
                begun = True
                await send({"type": "http.response.body", "body": line.data, "more_body": not line.last})
                room.release()
        except GoneError:
            pass
        finally:
            self.desk.leave(stop)
            leaving.cancel()
            doing.cancel()

    def head(self, first: Line) -> list[tuple[bytes, bytes]]:
        """Return the headers of a response that begins with this line."""
        if first.status != 200:
            self.headers["content-type"] = "application/json"
        return self.raw_headers


async def coming(queue: "asyncio.Queue[Line]", leaving: "asyncio.Future[Any]", until: float) -> Line:
    """Return the next line, or an error line where the time is up. Raises GoneError where the client has disconnected."""
    getting: asyncio.Future[Line] = asyncio.ensure_future(queue.get())
    await asyncio.wait({getting, leaving}, timeout=max(until - time.monotonic(), 0), return_when=asyncio.FIRST_COMPLETED)
    if getting.done():
        return getting.result()
    getting.cancel()
    if leaving.done():
        raise GoneError
    return failure(504, f"this takes longer than {STREAM_SECONDS:.0f} s; ask for less.")


def failure(status: int, sentence: str) -> Line:
    """Make the last line of a stream that failed."""
    return Line(dumped({"error": sentence}) + b"\n", True, status)


def worked(lines: Callable[[Alive], Iterator[dict[str, Any]]], alive: Alive, hand: Callable[[Line], None]) -> None:
    """Run an iterator in one thread from beginning to end, since the contexts in it belong to a thread."""
    iterator: Iterator[dict[str, Any]] = iter(())
    try:
        try:
            alive()
            for line in (iterator := lines(alive)):
                hand(Line(dumped(line) + b"\n"))
            hand(Line(last=True))
        except (GoneError, asyncio.CancelledError):
            raise
        except Exception as error:
            hand(failure(status_of(error), told(error)))
    except (GoneError, asyncio.CancelledError):  # no client to send the error to
        return
    finally:
        getattr(iterator, "close", lambda: None)()
