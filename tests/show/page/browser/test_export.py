"""What is saved as a table, the HTML that embeds a page, and the page in the output cell of a notebook."""

import csv
import html
import json
import re
from pathlib import Path
from urllib.parse import quote

import pytest
import torch

import regard
from regard import GPT2
from regard.models.gpt2_adapter import GPT2Adapter
from regard.show.page.session import Session
from show.page.browser.page_waits import wait_until, wait_until_settled
from show.page.browser.recordings import PLAIN, draw_queries_and_keys, record_layers, space_words

TEXT = "Lily had a red ball. Tom had a blue ball. Lily gave her red ball to Tom, and Tom gave his"
T, LAYER, HEAD, QUERY = 13, 1, 2, 7


@pytest.fixture(scope="module")
def recording():
    return record_layers(*draw_queries_and_keys(2, 3, T), space_words(PLAIN, T))


@pytest.fixture(scope="module")
def address(serving, recording):
    session = Session(recording, GPT2Adapter("pocket", GPT2.load("pocket", torch.float64)))
    session.run_text(TEXT, lambda: None)
    return serving(session)


def save(page, kind: str, folder: Path) -> str:
    """The text of the file that the menu saves."""
    page.get_by_role("button", name="Save").click()
    with page.expect_download() as saving:
        page.get_by_role("menuitem", name=kind).click()
    place = folder / saving.value.suggested_filename
    saving.value.save_as(place)
    return place.read_text(encoding="utf-8")


@pytest.mark.parametrize("view", ["text", "map", "compare"])
def test_the_weights_on_screen_are_saved_with_all_their_digits(open_page, address, recording, view, tmp_path):
    page = wait_until_settled(
        open_page(f"{address}#view={view}&r=r1&layer={LAYER}&head={HEAD}&q={QUERY}&head2={HEAD}&layer2={LAYER}")
    )
    rows = list(csv.DictReader(save(page, "CSV", tmp_path).splitlines()))
    exact = recording.map(LAYER, HEAD)[0, 0]
    shown = [one for one in rows if one.get("picture", "first") == "first" and one["weight"] not in ("", "0")]
    assert len(shown) == (QUERY + 1 if view == "text" else T * (T + 1) // 2)
    for one in shown:
        assert float(one["weight"]) == pytest.approx(float(exact[int(one["query"]), int(one["key"])]), rel=4e-4)
    if view == "text":
        assert [one["word"] for one in rows] == space_words(PLAIN, T)


@pytest.mark.parametrize("view", ["type", "heads", "steps"])
def test_each_view_saves_json_that_says_what_it_is(open_page, address, view, tmp_path):
    page = wait_until_settled(open_page(f"{address}#view={view}&r=r2&layer=5&head=4&step=weights"))
    found = json.loads(save(page, "JSON", tmp_path))
    assert found["view"] == view
    assert found["caption"] == page.locator("#caption").inner_text()
    assert found["link"] == page.url
    if view == "heads":
        assert len(found["rows"]) == 36
        assert {"layer", "head", "kind", "sentence", "induction"} <= set(found["rows"][0])
    elif view == "type":
        assert [one["word"] for one in found["rows"] if "key" in one][:2] == ["Lily", " had"]
        assert len([one for one in found["rows"] if "next" in one]) == 10
    else:
        assert len(found["rows"]) == 24**2
        assert {"step", "table", "row", "column", "value"} == set(found["rows"][0])


def test_the_embedding_is_html_with_the_state_of_the_link(open_page, address):
    page = wait_until_settled(open_page(f"{address}#view=map&r=r1&layer=1", permissions=["clipboard-read", "clipboard-write"]))
    page.get_by_role("button", name="Save").click()
    page.get_by_role("menuitem", name="Copy the HTML").click()
    wait_until(page, "document.querySelector('[role=status]') !== null")
    text = page.evaluate("navigator.clipboard.readText()")
    assert (
        html.unescape(re.search(r'^<iframe src="([^"]*)" title="[^"]+" sandbox="allow-scripts allow-downloads"', text)[1])
        == page.url
    )


def test_a_recording_stands_in_the_output_cell_of_a_notebook(open_page, recording, tmp_path):
    cell = tmp_path / "cell.html"
    shown = recording.page(height=640)
    assert "which a notebook shows" in repr(shown)
    cell.write_text(f"<!doctype html><title>cell</title>{shown._repr_html_()}", encoding="utf-8")
    page = open_page(f"file://{quote(str(cell))}")
    inner = page.frame_locator("iframe")
    inner.get_by_role("link", name="Map", exact=True).click()
    inner.locator("#stage.map canvas").wait_for()
    inner.get_by_role("link", name="Text", exact=True).click()
    inner.locator(".word").nth(3).click()
    inner.locator("#caption b").filter(has_text=PLAIN[3]).wait_for()
    assert page.url.endswith("cell.html")  # what is around it stays
    page.evaluate("document.querySelector('iframe').contentWindow.postMessage('', '*')")


def test_a_framed_page_cannot_reach_what_is_around_it(recording):
    frame = recording.page().html
    assert 'sandbox="allow-scripts allow-downloads"' in frame
    assert "allow-same-origin" not in frame
    with pytest.raises(regard.ConfigError, match="height must be"):
        recording.page(height=0)
