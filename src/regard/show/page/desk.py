"""Executor: work runs in threads as long as its client is connected, with a limit on concurrent requests."""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from starlette.requests import Request
from starlette.responses import Response

from regard.errors import RegardError
from regard.show.page.asked import MissingError
from regard.show.page.encoding import dumped
from regard.show.page.memory import Tidy
from regard.show.page.pictures import Alive, Opened

QUICK, LONG = 2, 2  # threads; each keeps some memory once it has computed
AT_ONCE = 64  # maximum concurrent requests; others get status 503
ANSWER_SECONDS = 300.0
LOG = logging.getLogger("regard.page")


class GoneError(Exception):
    """The client has disconnected."""


class BusyError(RegardError):
    """More requests than the limit."""


class Desk:
    """Threads for work that takes time, and a count of the active requests."""

    def __init__(self) -> None:
        self.quick = alone(QUICK, "regard-page")
        self.long = ThreadPoolExecutor(LONG, "regard-page-long")
        self.busy = 0
        self.tidy = Tidy()

    async def answer(
        self,
        request: Request,
        work: Callable[[Alive, list[Any]], Response],
        heads: Iterable[Callable[[], Opened]] = (),
        take: Callable[[Opened], Any] = lambda opened: opened,
        long: bool = False,
    ) -> Response:
        """Run `work` in a thread with what `take` returns for each of these heads, once computed, and return its response.

        The function alive() that `work` receives raises GoneError once the client has disconnected or the time is up.
        """
        stop = threading.Event()
        self.enter()
        doing: asyncio.Future[Any] = asyncio.ensure_future(self.done(work, heads, take, alive_until(stop), long))
        leaving: asyncio.Future[Any] = asyncio.ensure_future(left(request))
        try:
            await asyncio.wait({doing, leaving}, timeout=ANSWER_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if doing.done():
                found: Response = doing.result()
                return found
            if leaving.done():
                return Response(status_code=400)  # never read by the client
            return refusal(504, f"this takes longer than {ANSWER_SECONDS:.0f} s; ask for less.")
        except (RegardError, ValueError) as error:
            return refusal(status_of(error), told(error))
        finally:
            self.leave(stop)
            leaving.cancel()
            doing.add_done_callback(lambda done: done.cancelled() or done.exception())  # else asyncio logs it
            doing.cancel()

    async def done(
        self,
        work: Callable[[Alive, list[Any]], Response],
        heads: Iterable[Callable[[], Opened]],
        take: Callable[[Opened], Any],
        alive: Alive,
        long: bool,
    ) -> Response:
        """Run `work` after the heads it needs are computed; waiting for another request's computation occupies no thread."""
        run = asyncio.get_running_loop().run_in_executor
        found = []
        for make in heads:
            opened = await run(self.quick, make)
            while opened.busy():
                await asyncio.sleep(0.02)
            if opened.share < 1:
                await run(self.long, opened.wait, alive)
            found.append(take(opened))  # the session may remove the head meanwhile, to make room
            del opened
        return await run(self.long if long else self.quick, work, alive, found)

    def enter(self) -> None:
        """Count one more request. Raises BusyError at the limit."""
        if self.busy >= AT_ONCE:
            raise BusyError(f"{AT_ONCE} requests are being answered; try again in a moment.")
        self.busy += 1

    def leave(self, stop: threading.Event) -> None:
        """End a request and the work that still runs for it."""
        stop.set()
        self.busy -= 1
        if self.tidy.due():
            self.long.submit(self.tidy)

    def close(self) -> None:
        """Shut down the threads; queued work is canceled."""
        for pool in (self.quick, self.long):
            pool.shutdown(wait=False, cancel_futures=True)


def alone(count: int, name: str) -> ThreadPoolExecutor:
    """Create threads in each of which torch computes on one core.

    They run quick work, several at a time; OpenMP threads that wait for each other while others compute would take ten times as
    long.
    """
    before, begun = torch.get_num_threads(), threading.Barrier(count + 1)

    def begin() -> None:
        torch.set_num_threads(1)
        begun.wait()

    pool = ThreadPoolExecutor(count, name, begin)
    for _ in range(count):
        pool.submit(int)
    begun.wait()
    torch.set_num_threads(before)  # for threads started later
    return pool


def alive_until(stop: threading.Event) -> Alive:
    """Return a function that raises GoneError once `stop` is set."""

    def alive() -> None:
        if stop.is_set():
            raise GoneError

    return alive


async def left(request: Request) -> None:
    """Return when the client has disconnected."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def told(error: Exception) -> str:
    """Describe an error in one sentence; an unexpected error is logged with its traceback."""
    if isinstance(error, RegardError):
        return " ".join(str(error).split())
    LOG.error("a request of the page failed", exc_info=error)
    return "something went wrong inside regard; the terminal that runs it says what."


def status_of(error: Exception) -> int:
    """Return the HTTP status of an error."""
    if isinstance(error, MissingError):
        return 404
    if isinstance(error, BusyError):
        return 503
    return 400 if isinstance(error, RegardError) else 500


def refusal(status: int, sentence: str) -> Response:
    """Make an error response of one sentence."""
    return Response(dumped({"error": sentence}), status, {"cache-control": "no-store"}, "application/json")
