"""Waiting for what a page will say: its strict policy lets no string be run later, so it is asked again and again."""

import time
from typing import Any
from urllib.parse import parse_qs
from weakref import WeakKeyDictionary

PATIENCE = 240.0  # seconds, on a busy machine whose loops are compiled for the first time
STILL = 0.1  # seconds without a question before a page counts as quiet
DRAWN = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done))))"
RUNG = "(milliseconds) => new Promise((done) => setTimeout(done, milliseconds))"
FLYING: WeakKeyDictionary[Any, set] = WeakKeyDictionary()  # what each page has asked for and not had yet


def count_requests(page: Any) -> Any:
    """The page, whose questions are counted from now on: the browser's own "networkidle" comes once a navigation only."""
    flying = FLYING[page] = set()
    page.on("request", lambda request: flying.add(request))
    page.on("requestfinished", lambda request: flying.discard(request))
    page.on("requestfailed", lambda request: flying.discard(request))
    return page


def wait_for_frames(page: Any) -> Any:
    """The page once it has drawn what it knows, and done what it put off until then, however slow it is."""
    page.evaluate(DRAWN)
    return page


def wait_for_timers(page: Any, milliseconds: int) -> Any:
    """The page once its own timers of less than this have rung: they all go by one clock, however slow it is."""
    wait_for_frames(page).evaluate(RUNG, milliseconds)
    return page


def wait_until_quiet(page: Any) -> Any:
    """The page once it has every answer, has drawn what it knows, and has asked for nothing more for a moment."""
    end, since = time.monotonic() + PATIENCE, time.monotonic()
    while time.monotonic() < end:
        asked = len(FLYING[page])
        wait_for_frames(page)
        if asked or FLYING[page]:
            since = time.monotonic()
        elif time.monotonic() - since > STILL:
            return page
    raise AssertionError(f"the page still waits for {[request.url for request in FLYING[page]]}")


def wait_until(page: Any, expression: str) -> Any:
    """The value of an expression once it is true; AssertionError where it does not become so."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        found = page.evaluate(expression)
        if found:
            return found
        page.wait_for_timeout(20)
    raise AssertionError(f"this did not become true: {expression}; the page stands at {page.evaluate('location.hash')}")


def link(page: Any) -> dict[str, str]:
    """The pairs of the page's link."""
    return {name: values[0] for name, values in parse_qs(page.evaluate("location.hash.slice(1)")).items()}


def wait_until_settled(page: Any) -> Any:
    """The page once it has drawn what it was asked for."""
    wait_until(page, "document.querySelector('#caption').textContent !== '' && document.querySelector('#wait').hidden")
    return wait_until_quiet(page)
