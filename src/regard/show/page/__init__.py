"""The page: any recording in a browser, served live or written to one file."""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from regard.errors import ConfigError


def serve(
    subject: Any,
    *,
    text: str | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    open_browser: bool = False,
    scores: Sequence[Any] = (),
    image: Any = None,
    attribution: Any = None,
    number: str | None = None,
) -> None:
    """Serve the page of a recording or a model to a browser until Ctrl-C, and print its address.

    A model is a GPT2, a translator, or an object with tokens, encode, decode and run; `text` is what it reads first. On other
    than loopback addresses the link contains a token, without which requests are refused. Port 0 selects a free one. `scores`
    are functions of an AttentionMap for the table of the heads, as regard.heads takes them. `image`, `attribution` and `number`
    are of a recording, as regard.page takes them. Raises ConfigError where the address is taken, one of these is not such a
    value, or starlette and uvicorn are not installed.
    """
    from regard.mechanism.arguments import check_count, check_instance  # imports torch, which the page needs anyway

    check_count("port", port, 0, most=2**16 - 1)
    check_instance("host", host, str)
    check_instance("open_browser", open_browser, bool)
    named = {} if number is None else {"number": number}
    settings = {"text": text, "host": host, "port": port, "scores": scores, "image": image, "attribution": attribution, **named}
    server = import_server().make_server(subject, **settings)
    server.run(lambda: server.announce(open_browser))


def import_server() -> Any:
    """Import the server module. Raises ConfigError where its dependencies are not installed."""
    try:
        return import_module("regard.show.page.server")
    except ModuleNotFoundError as error:
        raise ConfigError(f"the live page needs {error.name}: pip install 'regard[view]'.") from None
