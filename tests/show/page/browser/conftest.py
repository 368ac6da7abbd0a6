"""A real Chromium before a real server: what a page said on its console and whom it called is checked when it is closed."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from show.page.browser.page_waits import PATIENCE, count_requests
from show.page.server_client import fill_in_ids

SESSIONS = {}  # of the addresses that are served
LOCAL = ("data", "blob", "file", "about")


def pytest_collection_modifyitems(items) -> None:
    """A browser takes seconds to start and to draw: its tests are none of the everyday run."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.slow)


@pytest.fixture
def open_page(browser) -> Iterator[Callable]:
    """open_page(address, dark=, width=, height=, answered=) is a page; at the end it must be quiet and have called nobody else.

    r1, r2, ... in a link are the recordings that all visitors see.
    """
    with ExitStack() as stack:

        def new(
            address: str,
            *,
            dark: bool = False,
            width: int = 1280,
            height: int = 800,
            quiet: bool = True,
            answered=None,
            **settings,
        ):
            look = {"color_scheme": "dark" if dark else "light", "viewport": {"width": width, "height": height}}
            context = stack.enter_context(browser.new_context(**look, **settings))
            page, said, called = count_requests(context.new_page()), [], []
            page.set_default_timeout(1000 * PATIENCE)
            page.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
            page.on("pageerror", lambda error: said.append(str(error)))
            page.on("request", lambda request: called.append(request.url))
            if answered is not None:
                page.on("response", answered)
            session = SESSIONS.get(address.partition("#")[0])
            page.goto(fill_in_ids(session, address) if session else address)
            host = urlsplit(address).netloc

            def check() -> None:
                foreign = [url for url in called if urlsplit(url).netloc != host and urlsplit(url).scheme not in LOCAL]
                assert not foreign, foreign
                assert not (quiet and said), said

            stack.callback(check)
            return page

        yield new


@pytest.fixture(scope="module")
def serving() -> Iterator[Callable]:
    """serving(session) is the address of a server of it, until the module's tests are done."""
    pytest.importorskip("uvicorn", reason="uvicorn is not installed: pip install regard[view]")
    from regard.show.page.server import Server

    with ExitStack() as stack:

        def serve(session) -> str:
            address = stack.enter_context(Server(session)).address
            SESSIONS[address] = session
            return address

        yield serve
