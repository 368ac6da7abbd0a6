"""Security of the server: the check of every request, and the headers of every response."""

import hmac
import ipaddress
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Callable[[], Awaitable[Message]], Send], Awaitable[None]]
Refuse = Callable[[int, str], Application]  # makes a response of a status and a sentence

HEAD_BYTES = 2**14
HOST_PATTERN = re.compile(r"(?P<name>[A-Za-z0-9.-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(:[0-9]{1,5})?")
CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
SECURITY_HEADERS = {
    "content-security-policy": CONTENT_POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",  # a link may hold a token
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


def is_loopback(host: str) -> bool:
    """Return whether an address is a loopback address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def parse_host(host: str) -> str | None:
    """Return the name in a Host header without its port, or None where it is invalid."""
    found = HOST_PATTERN.fullmatch(host)
    return found["name"].strip("[]").lower() if found else None


class SecurityMiddleware:
    """An ASGI middleware that admits only requests of its own page, and adds its headers to every response.

    On a loopback address Host must be a loopback name, since any site can point a name of its own there (DNS rebinding). On
    other addresses the page and everything under /api need the token. An Origin must always be the page's own.
    """

    def __init__(self, inner: Application, refuse: Refuse, token: str | None) -> None:
        self.inner, self.refuse, self.token = inner, refuse, token

    async def __call__(self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = [(name.encode(), value.encode()) for name, value in SECURITY_HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", []), *own]}
            await send(message)

        why = self.find_refusal(scope)
        await (self.refuse(*why) if why else self.inner)(scope, receive, send_with_headers)

    def find_refusal(self, scope: Message) -> tuple[int, str] | None:
        """Return the status and sentence with which a request is refused, or None where it is admitted."""
        size = (
            len(scope["query_string"])
            + len(scope["raw_path"])
            + sum(len(name) + len(value) for name, value in scope["headers"])
        )
        if size > HEAD_BYTES:
            return 431, f"The address and the headers of a request may have at most {HEAD_BYTES:,} bytes, got {size:,}."
        headers: dict[str, list[str]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))
        hosts, origins = headers.get("host", []), headers.get("origin", [])
        host = parse_host(hosts[0]) if len(hosts) == 1 else None
        if host is None or (self.token is None and not is_loopback(host)):
            return 403, "This page can be opened only at the address that it was started with, localhost or 127.0.0.1."
        if any(origin != f"{scope['scheme']}://{hosts[0]}" for origin in origins):
            return 403, "The request comes from another page. Open this page at its own address."
        inside = scope["path"].startswith("/api/")
        if inside and headers.get("sec-fetch-site", ["same-origin"])[0] in ("cross-site", "same-site"):
            return 403, "The request comes from another page. Open this page at its own address."
        if self.token is not None and not scope["path"].startswith("/static/"):
            came = headers.get("x-regard-token", [""])[0] if inside else extract_token(scope["query_string"])
            if not hmac.compare_digest(came.encode(), self.token.encode()):
                return 403, "The token is missing or wrong. Open the page with the full link that regard serve printed."
        return None


def extract_token(query: bytes) -> str:
    """Return the token in a page's address, or an empty string."""
    found = re.search(r"(?:^|&)token=([A-Za-z0-9_-]{1,100})(?:&|$)", query.decode("latin-1"))
    return found[1] if found else ""
