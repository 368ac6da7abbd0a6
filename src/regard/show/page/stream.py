"""Lines: an answer that comes an object a line, as they are found, for as long as somebody reads it."""

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

AHEAD = 16  # lines that wait for a client
STREAM_SECONDS = 3600.0


class Line(NamedTuple):
    """What is sent, whether it is the last, and the status of one that says what went wrong."""

    data: bytes = b""
    last: bool = False
    status: int = 200


class Lines(Response):
    """NDJSON, an object a line as they come; an error in words is the last line of a stream that failed.

    What fails before its first line is no stream, but an error with its status.
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
            except RuntimeError:  # the server is no more
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
        """The headers of an answer that begins so."""
        if first.status != 200:
            self.headers["content-type"] = "application/json"
        return self.raw_headers


async def coming(queue: "asyncio.Queue[Line]", leaving: "asyncio.Future[Any]", until: float) -> Line:
    """The next line; GoneError where the client has gone, and what to say where the time is up."""
    getting: asyncio.Future[Line] = asyncio.ensure_future(queue.get())
    await asyncio.wait({getting, leaving}, timeout=max(until - time.monotonic(), 0), return_when=asyncio.FIRST_COMPLETED)
    if getting.done():
        return getting.result()
    getting.cancel()
    if leaving.done():
        raise GoneError
    return failure(504, f"this takes longer than {STREAM_SECONDS:.0f} s; ask for less.")


def failure(status: int, sentence: str) -> Line:
    """The last line of a stream that failed."""
    return Line(dumped({"error": sentence}) + b"\n", True, status)


def worked(lines: Callable[[Alive], Iterator[dict[str, Any]]], alive: Alive, hand: Callable[[Line], None]) -> None:
    """Runs an iterator in one thread from its beginning to its end, since the contexts in it belong to a thread."""
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
    except (GoneError, asyncio.CancelledError):  # nobody is there to hear it
        return
    finally:
        getattr(iterator, "close", lambda: None)()
