"""Timeouts of the server: a connection that is slow to request, to send or to receive is dropped."""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from regard.show.page.security import SECURITY_HEADERS

REQUEST_SECONDS = 10.0  # for the whole head of a request, and between requests
BODY_SECONDS = 20.0  # for its body
DRAIN_SECONDS = 60.0  # until it has received all that is buffered for it
CHECK_SECONDS = 1.0
MAX_CONNECTIONS = 256  # maximum open connections; others are closed at once


class TimeoutProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 protocol, which waits forever, with timeouts."""

    _idle_since: float  # time since which no request is being answered
    _body_complete_since: float  # time since which the body of a request is incomplete
    _drained_since: float  # time since which the write buffer has not been empty
    _timer: asyncio.TimerHandle

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._idle_since = self._body_complete_since = self._drained_since = self.loop.time()
        self._timer = self.loop.call_later(CHECK_SECONDS, self.check_timeouts)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()

    def send_400_response(self, msg: str) -> None:
        """Send an error in JSON, the format of all answers, for an invalid request."""
        body = b'{"error":"what came is no HTTP request that is understood here."}'
        headers = {"content-type": "application/json", "content-length": len(body), "connection": "close", **SECURITY_HEADERS}
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self.transport.write(b"HTTP/1.1 400 Bad Request\r\n" + head.encode() + b"\r\n" + body)
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self._idle_since = self.loop.time()
        super().on_response_complete()

    def check_timeouts(self) -> None:
        """Drop the connection if it has been slow, else schedule the next check."""
        now = self.loop.time()
        if not self.transport.get_write_buffer_size():
            self._drained_since = now
        answering = self.cycle is not None and not self.cycle.response_complete
        if answering:
            self._idle_since = now
        if not (answering and self.cycle.more_body):
            self._body_complete_since = now
        if (
            now - self._idle_since > REQUEST_SECONDS
            or now - self._body_complete_since > BODY_SECONDS
            or now - self._drained_since > DRAIN_SECONDS
        ):
            self.transport.abort()
            return
        self._timer = self.loop.call_later(CHECK_SECONDS, self.check_timeouts)
