"""Debian's Chromium, for pictures, benchmarks and tests of the page."""

import shutil
from typing import Any


def find_chromium() -> str | None:
    """Return the path of Chromium; without a window, where both are installed, which takes half of the processor's time."""
    return shutil.which("chromium-headless-shell") or shutil.which("chromium")


def launch_chromium(playwright: Any) -> Any:
    """Launch Chromium without a process for graphics, which is emulated where there is no screen, and slows it down."""
    return playwright.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox", "--disable-gpu"])
