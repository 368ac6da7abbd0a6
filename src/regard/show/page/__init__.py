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
) -> None:
    """Serve the page of a recording or a model to a browser until Ctrl-C, and print its address.

    A model is a GPT2, a translator, or an object with tokens, encode, decode and run; `text` is what it reads first. On other
    than loopback addresses the link contains a token, without which requests are refused. Port 0 selects a free one. `scores`
    are functions of an AttentionMap for the table of the heads, as regard.heads takes them. Raises ConfigError where the
    address is taken, a score is not such a function, or starlette and uvicorn are not installed.
    """
    from regard.mechanism.arguments import check_count, check_instance  # imports torch, which the page needs anyway

    check_count("port", port, 0, most=2**16 - 1)
    check_instance("host", host, str)
    check_instance("open_browser", open_browser, bool)
    server = import_server().make_server(subject, text=text, host=host, port=port, scores=scores)
    server.run(lambda: server.announce(open_browser))


def import_server() -> Any:
    """Import the server module. Raises ConfigError where its dependencies are not installed."""
    try:
        return import_module("regard.show.page.server")
    except ModuleNotFoundError as error:
        raise ConfigError(f"the live page needs {error.name}: pip install 'regard[view]'.") from None
