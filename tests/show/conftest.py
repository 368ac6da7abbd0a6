"""One Chromium for all tests of a file that look at what a browser shows.

Its event loop stays in the process until it is closed, and no test could start another, so files do not share it.
"""

from collections.abc import Iterator

import pytest
from docs.chromium import find_chromium, launch_chromium


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    if find_chromium() is None:
        pytest.skip("there is no chromium here: make browser installs Debian's")
    sync = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install regard[dev]")
    with sync.sync_playwright() as playwright:
        # without a process for graphics, which is emulated here and slows the tests down
        running = launch_chromium(playwright, "--disable-gpu")
        yield running
        running.close()
