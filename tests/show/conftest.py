"""One Chromium for all tests that look at what a browser shows: playwright runs one at a time in a process."""

import shutil
from collections.abc import Iterator

import pytest

CHROMIUM = shutil.which("chromium-headless-shell") or shutil.which("chromium")  # the first takes half of the processor's time


@pytest.fixture(scope="session")
def browser() -> Iterator[object]:
    if CHROMIUM is None:
        pytest.skip("there is no chromium here: make browser installs Debian's")
    sync = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install regard[dev]")
    with sync.sync_playwright() as playwright:
        # without a process for graphics, which is emulated here and slows the tests down
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield running
        running.close()
