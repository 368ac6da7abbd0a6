"""Waiting for what a page will say: its strict policy lets no string be run later, so it is asked again and again."""

import time
from typing import Any
from urllib.parse import parse_qs

PATIENCE = 20.0  # seconds, on a busy machine


def until(page: Any, expression: str) -> Any:
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


def settled(page: Any) -> Any:
    """The page once it has drawn what it was asked for."""
    until(page, "document.querySelector('#caption').textContent !== '' && document.querySelector('#wait').hidden")
    page.wait_for_load_state("networkidle")
    return page
