"""A page that is opened while the models are loaded: it says how far they are, and opens once they are there."""

import threading
from types import SimpleNamespace

from regard.show.page import server as module
from regard.show.page.server import make_server
from regard.show.page.startup_loading import StartupLoading
from show.page.browser.page_waits import wait_until
from show.page.server_client import make_sorter


def test_the_page_says_how_far_the_model_is_loaded_and_then_opens(open_page, monkeypatch):
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.0)
    gate, progress = threading.Event(), SimpleNamespace(label="the model sorter", done=0, total=0)
    loading = StartupLoading(lambda: gate.wait(60) and [make_sorter()], progress)
    try:
        with make_server(loading=loading) as running:
            page = open_page(running.address)
            wait_until(page, "!document.querySelector('#wait').hidden")
            assert page.locator("#wait").inner_text() == "Loading the model sorter …"
            progress.done, progress.total = 3, 12
            wait_until(page, "document.querySelector('#wait').textContent.includes('25 %')")
            assert page.locator("#wait progress").get_attribute("value") == "0.25"
            gate.set()
            wait_until(page, "document.querySelectorAll('#views a').length > 3")
            wait_until(page, "document.querySelector('#wait').hidden")
    finally:
        gate.set()
