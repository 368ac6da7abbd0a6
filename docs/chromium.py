"""Debian's Chromium, for pictures, benchmarks and tests of the page."""

import shutil
from typing import Any


def find_chromium() -> str | None:
    """Return the path of Chromium, or None; of two, the one without windows, which takes half of the processor's time."""
    return shutil.which("chromium-headless-shell") or shutil.which("chromium")


def launch_chromium(playwright: Any, *flags: str) -> Any:
    """Launch Chromium with some flags."""
    return playwright.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox", *flags])
