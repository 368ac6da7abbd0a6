"""What a notebook shows of layers without a softmax: their signed entries, apart from weights."""

import json
import re

import pytest
import torch

from regard.show.color_scale import SIGNED_DECADES
from regard.show.svg_matrix import SHADES
from show.elements import Page, pixels
from show.implicit_recordings import SiluAttention, SoftmaxAttention, pool_signed, record_implicit, record_spread
from show.test_notebook import open_cell

T, LONG = 11, 307
MIDDLE = (SHADES - 2) / 2  # the index of 0 in the palette
NOTE = "No softmax: entries are signed, blue above 0, brown below; rows need not sum to 1."


@pytest.fixture(scope="module")
def recording():
    return record_implicit(T, SoftmaxAttention, SiluAttention, SiluAttention)


def test_every_pixel_is_the_entry_it_stands_for(recording):
    m = recording.map(0, kind="implicit")
    shown = m._repr_html_()
    images = Page(shown).all("img")
    dense = m.dense()[0]
    high = float(dense.abs().max())
    assert len(images) == m.shape[1]
    for head, element in enumerate(images):
        told = json.loads(element["data-frame"])
        assert told["ends"] == pytest.approx([-high, high], rel=1e-12)
        found = (pixels(element) - MIDDLE) / MIDDLE * high
        torch.testing.assert_close(found.double(), dense[head], atol=0.501 * high / MIDDLE, rtol=0)  # half a shade
    assert NOTE in shown
    assert "The first of 2 batch rows." in shown
    assert "silu attention" in shown
    assert len(shown) < 300_000


def test_a_long_map_whose_entries_are_mostly_small_is_drawn_over_four_decades():
    m = record_spread(LONG).map(0, 1, kind="implicit")
    shown = m._repr_html_()
    (element,) = Page(shown).all("img")
    pooled = pool_signed(m.dense()[0, 0], 240, 240, "max")
    high = float(pooled.abs().max())
    share = (1 + (pooled.abs() / high).log10() / SIGNED_DECADES).clamp(min=0) * pooled.sign()
    found = (pixels(element) - MIDDLE) / MIDDLE
    torch.testing.assert_close(found.double(), share, atol=0.502 / MIDDLE, rtol=0)
    assert "Colors are logarithmic, over four decades on each side of 0." in shown


def test_a_recording_shows_both_kinds_of_layers_apart(recording):
    shown = recording._repr_html_()
    weights, entries = Page(shown).all("img")
    assert [json.loads(one["data-frame"])["ramp"] for one in (weights, entries)] == ["weights", "signed"]
    assert json.loads(entries["data-frame"])["tileWords"] == [["layer 0", "layer 1"], ["head 0", "head 1", "head 2"]]
    assert "2 layers without a softmax: silu attention" in shown
    assert NOTE in shown
    assert "Not drawn here" not in shown
    found, told = pixels(entries), json.loads(entries["data-frame"])
    for layer in (0, 1):
        dense = recording.map(layer, kind="implicit").dense()[0, 2]
        y, x = layer * (T + 1), 2 * (T + 1)
        cells = (found[y : y + T, x : x + T] - MIDDLE) / MIDDLE * told["ends"][1]
        torch.testing.assert_close(cells.double(), dense, atol=0.501 * told["ends"][1] / MIDDLE, rtol=0)


@pytest.mark.slow
def test_the_pointer_tells_a_signed_entry(browser, tmp_path, recording):
    m = recording.map(0, kind="implicit")
    dense = m.dense()[0]
    page, said = open_cell(browser, tmp_path, m)
    for head, query, key in ((0, 3, 4), (2, 10, 0), (1, 0, 10)):
        image = page.locator("img").nth(head)
        box, told = image.bounding_box(), json.loads(image.get_attribute("data-frame"))
        scale = box["width"] / told["width"]
        at = [told[side] + told[size] * (n + 0.5) / T for side, size, n in (("x", "w", key), ("y", "h", query))]
        page.mouse.move(box["x"] + at[0] * scale, box["y"] + at[1] * scale)
        words = page.locator(".regard-said").inner_text()
        assert words.startswith(f"head {head}: query {query} “{query}” → key {key} “{key}”: ≈ ")
        close = 0.501 * told["ends"][1] / MIDDLE + 0.501e-2
        assert float(words.rpartition(" ")[2]) == pytest.approx(float(dense[head, query, key]), abs=close)
    assert said == []
    m = record_spread(LONG).map(0, 1, kind="implicit")
    pooled = pool_signed(m.dense()[0, 0], 240, 240, "max")
    page, said = open_cell(browser, tmp_path, m)
    image = page.locator("img")
    box, told = image.bounding_box(), json.loads(image.get_attribute("data-frame"))
    places = pooled.argmax(), pooled.argmin(), pooled.abs().flatten().argsort()[-500]
    for row, column in (divmod(int(place), 240) for place in places):
        page.mouse.move(
            box["x"] + told["x"] + told["w"] * (column + 0.5) / 240, box["y"] + told["y"] + told["h"] * (row + 0.5) / 240
        )
        words = page.locator(".regard-said").inner_text()
        assert re.search(r": largest in size ≈ -?[\d.e-]+$", words), words
        step = 10 ** (SIGNED_DECADES * 0.51 / MIDDLE)  # half a shade
        assert float(words.rpartition(" ")[2]) == pytest.approx(float(pooled[row, column]), rel=step - 1 + 0.051)  # two digits
    assert said == []
