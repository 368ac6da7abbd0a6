"""Executor: work runs in threads as long as its client is connected, with a limit on concurrent requests."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from starlette.requests import Request
from starlette.responses import Response

from regard.errors import RegardError
from regard.malloc import set_mmap_threshold, trim_heap
from regard.show.page.head_pictures import Alive, OpenedHead
from regard.show.page.json_encoding import encode_json
from regard.show.page.params import MissingError

QUICK_THREADS, LONG_THREADS = 2, 2  # threads; each keeps some memory once it has computed
MAX_TEXTS = 16  # texts that are written at a time, each in a thread; a newer one ends the oldest with status 503
MAX_REQUESTS = 64  # maximum concurrent requests; others get status 503
ANSWER_SECONDS = 300.0
TRIM_SECONDS = 3.0  # between two times that freed memory is returned to the system
LARGE_BYTES = 2**20  # of blocks returned at once; glibc's own threshold grows with what is freed, up to 32 MiB
LOG = logging.getLogger("regard.page")


class DisconnectedError(Exception):
    """The client has disconnected."""


class BusyError(RegardError):
    """More requests than the limit."""


class RequestState:
    """What a request has become: `error` is raised in the threads that work for it."""

    error: Exception | None = None

    def check(self) -> None:
        """Raise the error, if there is one."""
        if self.error is not None:
            raise self.error


class RequestExecutor:
    """Threads for work that takes time, and a count of the active requests."""

    def __init__(self) -> None:
        self.quick = make_single_core_pool(QUICK_THREADS, "regard-page")
        self.long = ThreadPoolExecutor(LONG_THREADS, "regard-page-long")
        self.writing = ThreadPoolExecutor(MAX_TEXTS, "regard-page-writing")
        self.request_count = 0
        self.texts: list[RequestState] = []  # those that are written, the oldest first
        self.next_trim = 0.0
        set_mmap_threshold(LARGE_BYTES)

    async def run_request(
        self,
        request: Request,
        work: Callable[[Alive, list[Any]], Response],
        heads: Iterable[Callable[[], OpenedHead]] = (),
        take: Callable[[OpenedHead], Any] = lambda opened: opened,
        long: bool = False,
    ) -> Response:
        """Run `work` in a thread with what `take` returns for each of these heads, once computed, and return its response.

        The function alive() that `work` receives raises DisconnectedError once the client has disconnected or the time is up.
        """
        state = self.begin_request()
        doing: asyncio.Future[Any] = asyncio.ensure_future(self.run_work(work, heads, take, state.check, long))
        leaving: asyncio.Future[Any] = asyncio.ensure_future(wait_for_disconnect(request))
        try:
            await asyncio.wait({doing, leaving}, timeout=ANSWER_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if doing.done():
                found: Response = doing.result()
                return found
            if leaving.done():
                return Response(status_code=400)  # never read by the client
            return make_error_response(504, f"the request takes longer than {ANSWER_SECONDS:.0f} s; request less.")
        except (RegardError, ValueError) as error:
            return make_error_response(get_status(error), describe_error(error))
        finally:
            self.end_request(state)
            leaving.cancel()
            doing.add_done_callback(lambda done: done.cancelled() or done.exception())  # else asyncio logs it
            doing.cancel()

    async def run_work(
        self,
        work: Callable[[Alive, list[Any]], Response],
        heads: Iterable[Callable[[], OpenedHead]],
        take: Callable[[OpenedHead], Any],
        alive: Alive,
        long: bool,
    ) -> Response:
        """Run `work` after the heads it needs are computed; waiting for another request's computation occupies no thread."""
        run = asyncio.get_running_loop().run_in_executor
        found = []
        for make in heads:
            opened = await run(self.quick, make)
            while opened.is_busy():
                await asyncio.sleep(0.02)
            if opened.done_share < 1:
                await run(self.long, opened.wait_for_pyramid, alive)
            found.append(take(opened))  # the session may remove the head meanwhile, to make room
            del opened
        return await run(self.long if long else self.quick, work, alive, found)

    def begin_request(self, is_text: bool = False) -> RequestState:
        """Count one more request, and end the oldest text where one more is written. Raises BusyError at the limit."""
        if self.request_count >= MAX_REQUESTS:
            raise BusyError(f"{MAX_REQUESTS} requests are being answered; try again in a moment.")
        self.request_count += 1
        state = RequestState()
        if is_text:
            self.texts.append(state)
            for oldest in self.texts[:-MAX_TEXTS]:
                oldest.error = BusyError(f"{MAX_TEXTS} newer texts are being written; try again in a moment.")
        return state

    def end_request(self, state: RequestState) -> None:
        """End a request and the work that still runs for it."""
        state.error = DisconnectedError()
        self.request_count -= 1
        if state in self.texts:
            self.texts.remove(state)
        if time.monotonic() >= self.next_trim:
            self.next_trim = time.monotonic() + TRIM_SECONDS
            self.long.submit(trim_heap)

    def close(self) -> None:
        """Shut down the threads; queued work is canceled."""
        for pool in (self.quick, self.long, self.writing):
            pool.shutdown(wait=False, cancel_futures=True)


def make_single_core_pool(count: int, name: str) -> ThreadPoolExecutor:
    """Create threads in each of which torch computes on one core.

    They run quick work, several at a time; OpenMP threads that wait for each other while others compute would take ten times as
    long.
    """
    before, begun = torch.get_num_threads(), threading.Barrier(count + 1)

    def limit_threads() -> None:
        torch.set_num_threads(1)
        begun.wait()

    pool = ThreadPoolExecutor(count, name, limit_threads)
    for _ in range(count):
        pool.submit(int)
    begun.wait()
    torch.set_num_threads(before)  # for threads started later
    return pool


async def wait_for_disconnect(request: Request) -> None:
    """Return when the client has disconnected."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def describe_error(error: Exception) -> str:
    """Describe an error in one sentence; an unexpected error is logged with its traceback."""
    if isinstance(error, RegardError):
        return " ".join(str(error).split())
    LOG.error("a request of the page failed", exc_info=error)
    return "an unexpected error occurred inside regard; the terminal that runs it shows the details."


def get_status(error: Exception) -> int:
    """Return the HTTP status of an error."""
    if isinstance(error, MissingError):
        return 404
    if isinstance(error, BusyError):
        return 503
    return 400 if isinstance(error, RegardError) else 500


def make_error_response(status: int, sentence: str) -> Response:
    """Make an error response of one sentence."""
    return Response(encode_json({"error": sentence}), status, {"cache-control": "no-store"}, "application/json")
