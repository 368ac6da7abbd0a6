"""recording.page() in an output cell, embedded as notebooks embed it, each with its own frames and policy around the cell.

- JupyterLab and Notebook put the HTML of a trusted cell into their own document; jupyter_server sends a policy with
  frame-ancestors alone.
- VS Code puts it into a document of a sandboxed frame (webview/browser/pre/index.html), whose policy allows inline scripts and
  images by https:, http: and data: alone (notebook/browser/view/renderers/backLayerWebView.ts). A frame by srcdoc inherits it.
- Colab puts it into a sandboxed frame of another host.
"""

import json
from pathlib import Path

import pytest

from show.page.browser.page_waits import PATIENCE, count_requests
from show.page.browser.recordings import PLAIN, draw_queries_and_keys, record_layers, space_words

T = 13
SANDBOX = {
    "VS Code": "allow-scripts allow-same-origin allow-forms allow-pointer-lock allow-downloads",
    "Colab": "allow-downloads allow-forms allow-pointer-lock allow-popups allow-popups-to-escape-sandbox allow-same-origin "
    "allow-scripts allow-storage-access-by-user-activation",
}
GRANTS = {
    "VS Code": "cross-origin-isolated; autoplay; clipboard-read; clipboard-write",
    "Colab": "clipboard-read; clipboard-write",
}
CELLS = {"VS Code": "https://cells.test/", "Colab": "https://cells.test/"}  # the addresses of the frames
POLICY = {  # of the document that the cell is in
    "Jupyter": "frame-ancestors 'self'; report-uri /api/security/csp-report",
    "VS Code": "default-src 'none'; script-src 'self' https://*.vscode-cdn.net 'unsafe-inline' 'unsafe-eval'; style-src 'self' "
    "https://*.vscode-cdn.net 'unsafe-inline'; img-src 'self' https://*.vscode-cdn.net https: http: data:; font-src 'self' "
    "https://*.vscode-cdn.net https:; connect-src https:; child-src https: data:",
    "Colab": "",
}


@pytest.fixture(scope="module")
def cell():
    """The HTML of the output."""
    return record_layers(*draw_queries_and_keys(2, 3, T), space_words(PLAIN, T)).page(height=640)._repr_html_()


@pytest.fixture(params=list(POLICY))
def page_and_frame(request, browser, cell):
    """A page with the cell in it, and the frame of regard's page: what it says on its console fails the test."""
    product = request.param
    inserted = json.dumps(cell).replace("<", "\\u003c")
    insert = f"<script>document.querySelector('#cell').innerHTML = {inserted}</script>"
    output = f"<!doctype html><title>cells</title><div id=cell></div>{insert}"
    outer = f'<!doctype html><title>notebook</title><iframe src="{CELLS.get(product)}" sandbox="{SANDBOX.get(product)}" '
    outer += f'allow="{GRANTS.get(product)}" style="width: 100%; height: 750px; border: 0"></iframe>'
    with browser.new_context(viewport={"width": 1000, "height": 800}, accept_downloads=True) as context:
        page, said, called = count_requests(context.new_page()), [], []
        page.set_default_timeout(1000 * PATIENCE)
        page.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: said.append(str(error)))

        def answer(route) -> None:
            called.append(route.request.url)
            is_cell = product == "Jupyter" or route.request.url == CELLS[product]
            headers = {"content-security-policy": POLICY[product]} if is_cell and POLICY[product] else {}
            route.fulfill(body=output if is_cell else outer, content_type="text/html", headers=headers)

        context.route("**/*", answer)
        page.goto("https://notebook.test/")
        frame = page.frame_locator("iframe")
        yield page, frame if product == "Jupyter" else frame.frame_locator("iframe")
        assert said == []
        assert set(called) <= {"https://notebook.test/", "https://cells.test/"}


def test_the_page_works_in_the_output_cell(page_and_frame):
    page, inner = page_and_frame
    inner.locator("#finding:not([hidden])").wait_for()
    inner.get_by_role("link", name="Map", exact=True).click()
    inner.locator("#stage.map canvas").wait_for()
    inner.get_by_role("link", name="Text", exact=True).click()
    inner.locator(".word").nth(3).click()
    inner.locator("#caption b").filter(has_text=PLAIN[3]).wait_for()
    assert page.url == "https://notebook.test/"  # what is around it stays
    assert inner.locator("body").evaluate("() => origin") == "null"
    assert inner.locator("body").evaluate("() => { try { return Boolean(parent.document) } catch { return false } }") is False


def test_pictures_and_numbers_are_saved_from_the_output_cell(page_and_frame, tmp_path: Path):
    page, inner = page_and_frame
    inner.get_by_role("link", name="Map", exact=True).click()
    inner.locator("#stage.map canvas").wait_for()
    for kind, start in (("PNG", b"\x89PNG"), ("CSV", b"query")):
        inner.get_by_role("button", name="Save").click()
        with page.expect_download() as saving:
            inner.get_by_role("menuitem", name=kind).click()
        saving.value.save_as(tmp_path / kind)
        assert (tmp_path / kind).read_bytes().startswith(start)
