"""What a notebook shows: pictures without a script, larger and telling with it."""

import base64
import json
import re

import pytest
import torch

import regard
from regard import AttentionMap, Causal, attend
from regard.map.pooling import bin_edges
from regard.show import notebook
from regard.show.notebook import pool_cells
from regard.show.svg_matrix import SHADES
from show.elements import EVIL, Page, pixels
from show.small_recordings import record_long_text, record_small_model

PLACES = 0.501e-2  # half a unit of the last of two places


def half_a_shade(high):
    """How far a weight may lie from the shade that stands for it, on an even scale from 0."""
    return 0.501 * high / (SHADES - 1)


def make_value(name):
    q, k, v = torch.randn(3, 2, 3, 7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return {
        "map": AttentionMap(q, k, Causal()),
        "recording": record_small_model(),
        "heads": regard.heads(record_small_model()),
        "steps": attend(q, k, v, Causal()),
    }[name]


@pytest.mark.parametrize("name", ["map", "recording", "heads", "steps"])
def test_each_shows_itself_small_and_without_anything_from_elsewhere(name):
    shown = make_value(name)._repr_html_()
    page = Page(shown)
    assert page.all("img") or page.all("table")
    assert all(one["src"].startswith("data:image/svg+xml;base64,") for one in page.all("img"))
    assert len(shown) < 300_000
    assert "http" not in re.sub(r"base64,[^\"]+", "", shown)


def test_every_pixel_is_the_weight_it_stands_for():
    m = make_value("map")
    for head, element in enumerate(Page(m._repr_html_()).all("img")):
        dense, told = m.dense()[0, head], json.loads(element["data-frame"])
        low, high = told["ends"]
        found = pixels(element)
        assert ((found == SHADES) == (dense == 0)).all()
        seen = dense > 0
        shade = (high - low) / (SHADES - 1)
        torch.testing.assert_close(low + found[seen].double() * shade, dense[seen], atol=0.501 * shade, rtol=0)  # half a shade


@pytest.mark.parametrize("name", ["recording", "heads"])
def test_words_that_hold_html_are_always_text(name):
    recording = record_long_text(len(EVIL) * 20)
    kept, recording.tokens, recording.model = (recording.tokens, recording.model), EVIL * 20, EVIL[1]
    shown = (recording if name == "recording" else regard.heads(recording))._repr_html_()
    recording.tokens, recording.model = kept
    page = Page(shown)
    assert len(page.all("script")) == (1 if name == "recording" else 0)
    assert len(page.all("img")) == (1 if name == "recording" else 0)
    if name == "recording":
        assert page.text.startswith(EVIL[1])
        words = json.loads(page.all("div")[0]["data-words"])["columns"]
        assert words[:5] == EVIL[:5]
        assert words[5] == "\\x00"
        shown.encode()


def test_a_recording_shows_every_head_in_its_place():
    element = Page(record_small_model()._repr_html_()).all("img")[0]
    found, told = pixels(element), json.loads(element["data-frame"])
    high, wide = told["tile"]
    assert (told["log"], told["ends"]) == (False, [0, 1])  # few tokens, and most of the attention lies on large weights
    for layer in range(2):
        for head in range(3):
            dense = record_small_model().map(layer, head).dense()[0, 0]
            tile = found[layer * (high + 1) :, head * (wide + 1) :][:17, :17]
            expected = (dense * (SHADES - 1)).round()
            assert torch.equal(tile.double(), expected.where(dense > 0, SHADES))


def test_steps_are_described_with_their_numbers_and_formulas():
    page = Page(attend(*torch.ones(3, 2, 3), Causal())._repr_html_())
    assert "scaled = scores / √3" in page.text
    svg = base64.b64decode(page.all("img")[0]["src"].partition(",")[2]).decode()
    assert svg.count(">3.00</text>") == 4


@pytest.mark.parametrize("empty", [regard.Recording(), AttentionMap(*torch.zeros(2, 0, 2, 3, 2)), 7])
def test_what_has_nothing_to_draw_stays_text(empty):
    assert notebook.render_html(empty) is None


@pytest.mark.slow
def test_a_cell_of_a_real_notebook_that_ends_with_a_map_shows_its_picture():
    nbformat, nbclient = (pytest.importorskip(name) for name in ("nbformat", "nbclient"))
    cell = nbformat.v4.new_code_cell("import regard, torch\nx = torch.rand(1, 1, 5, 3)\nregard.AttentionMap(x, x)")
    book = nbformat.v4.new_notebook(cells=[cell])
    nbclient.NotebookClient(book, timeout=120, kernel_name="python3").execute()
    (output,) = [one for one in book.cells[0].outputs if one.output_type == "execute_result"]
    assert output.data["text/plain"].startswith("AttentionMap(1, 1, 5, 5)")
    assert Page(output.data["text/html"]).all("img")


def open_cell(browser, tmp_path, thing, scripts=True):
    """A page that holds what a value shows of itself, and what its console said."""
    (tmp_path / "cell.html").write_text(f"<!doctype html><meta charset=utf-8>{thing._repr_html_()}", encoding="utf-8")
    page = browser.new_context(java_script_enabled=scripts, viewport={"width": 900, "height": 900}).new_page()
    said = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("dialog", lambda dialog: said.append(dialog.message))
    page.goto((tmp_path / "cell.html").as_uri())
    return page, said


@pytest.mark.slow
def test_without_scripts_the_picture_is_there(browser, tmp_path):
    page, _ = open_cell(browser, tmp_path, make_value("map"), scripts=False)
    boxes = [page.locator("img").nth(n).bounding_box() for n in range(3)]
    assert all(box["width"] > 100 and box["height"] > 100 for box in boxes)
    assert "click" not in page.locator(".regard-said").inner_text()
    assert (
        "A click makes one larger." in open_cell(browser, tmp_path, make_value("map"))[0].locator(".regard-said").inner_text()
    )


@pytest.mark.slow
def test_the_pointer_tells_the_weight_under_it(browser, tmp_path):
    m = make_value("map")
    page, said = open_cell(browser, tmp_path, m)
    box = page.locator("img").nth(1).bounding_box()
    for query, key, across in ((6, 0, 0.5), (3, 2, 0.5), *((5, 5, n / 20) for n in range(4, 17))):  # over its number too
        page.mouse.move(box["x"] + box["width"] * (key + across) / 7, box["y"] + box["height"] * (query + 0.5) / 7)
        told = page.locator(".regard-said").inner_text()
        assert told.startswith(f"head 1: query {query} “{query}” → key {key} “{key}”: ≈ ")
        assert float(told.rpartition(" ")[2]) == pytest.approx(float(m[0, 1, query, key]), abs=half_a_shade(1.0) + PLACES)
    page.mouse.move(box["x"] + box["width"] - 3, box["y"] + 3)
    assert page.locator(".regard-said").inner_text().endswith("not seen")
    assert said == []


@pytest.mark.slow
def test_a_click_enlarges_the_wheel_zooms_at_the_pointer_and_escape_lets_go(browser, tmp_path):
    page, said = open_cell(browser, tmp_path, make_value("map"))
    image = page.locator("img").first
    before = image.bounding_box()
    image.click()
    large = image.bounding_box()
    assert large["width"] > 3 * before["width"]
    at = large["x"] + large["width"] * 4.5 / 7, large["y"] + large["height"] * 5.5 / 7
    page.mouse.move(*at)
    told = page.locator(".regard-said").inner_text()
    page.mouse.wheel(0, -400)
    page.wait_for_function("document.querySelector('img').getBoundingClientRect().width > 2000")
    page.mouse.move(at[0] + 1, at[1])
    assert page.locator(".regard-said").inner_text() == told
    page.keyboard.press("Escape")
    assert image.bounding_box() == before
    image.focus()
    page.keyboard.press("Enter")
    assert image.bounding_box()["width"] == large["width"]
    assert said == []


@pytest.mark.slow
def test_words_that_hold_html_do_nothing_in_a_browser(browser, tmp_path):
    recording = record_long_text(len(EVIL) * 20)
    kept, recording.tokens = recording.tokens, EVIL * 20
    page, said = open_cell(browser, tmp_path, recording)
    recording.tokens = kept
    assert page.locator("img").count() == 1
    assert page.locator(".regard").inner_text().count("</script>") > 3
    assert said == []


def some(q=53, k=53):
    sides = (torch.randn(2, 3, n, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in (q, k))
    return AttentionMap(*sides, Causal())


def test_a_long_one_shows_the_last_query_of_each_bin_and_the_largest_weight_of_each_of_keys():
    found, sampled = pool_cells(some(), 11, quick=100)
    assert sampled
    dense, ends = some().dense()[0].double(), bin_edges(0, 53, 11).tolist()
    for row in range(11):
        for column in range(11):
            expected = dense[:, ends[row + 1] - 1, ends[column] : ends[column + 1]].amax(-1)
            torch.testing.assert_close(found[:, row, column].nan_to_num(0), expected, atol=1e-12, rtol=0)
