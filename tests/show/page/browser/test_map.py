"""The Map view, used by mouse and by keyboard, against attend on the same q and k."""

import itertools
import re

import pytest
import torch

from regard.show.page.session import Session
from show.page.browser.page_waits import link, wait_for_timers, wait_until, wait_until_quiet, wait_until_settled
from show.page.browser.recordings import PLAIN, draw_queries_and_keys, expect_weight, record_layers, space_words, weights

LAYERS, HEADS, T = 2, 3, 13
Q, K = draw_queries_and_keys(LAYERS, HEADS, T)
LONG = draw_queries_and_keys(1, 1, 700, seed=3)
ZOOM = "Number(new URLSearchParams(location.hash.slice(1)).get('zoom'))"  # as the link says


@pytest.fixture(scope="module")
def address(serving):
    session = Session(record_layers(Q, K, space_words(PLAIN, T)))
    session.add_recording(record_layers(*LONG, space_words(PLAIN, 700)))
    return serving(session)


def read(page) -> tuple[int, int, float, str]:
    """Query, key, weight to all digits and rank, as the readout says."""
    wait_until(page, "document.querySelector('.readout dd').title !== ''")
    places = [int(re.sub(r"\D", "", text)) for text in page.locator(".readout-pair .numbers").all_inner_texts()]
    fields = page.locator(".readout dd")
    return *places, float(fields.nth(0).get_attribute("title").split()[0]), fields.nth(2).inner_text()


def test_the_weight_under_the_pointer_is_the_one_that_attend_gives(open_page, address):
    page = wait_until_settled(open_page(f"{address}#view=map&layer=1&head=2"))
    expected = weights(Q, K, 1, 2)
    box = page.locator("canvas").bounding_box()
    seen = set()
    for x, y in itertools.product((0.3, 0.4, 0.5), (0.4, 0.6, 0.8)):
        page.mouse.move(box["x"] + x * box["width"], box["y"] + y * box["height"])
        wait_for_timers(page, 60)
        wait_until_quiet(page)
        if page.locator(".readout dd").first.get_attribute("title"):
            q, k, weight, rank = read(page)
            assert weight == expect_weight(Q, K, 1, 2, q, k)
            assert rank == f"{1 + int((expected[q, : q + 1] > expected[q, k]).sum())} of {q + 1}"
            seen.add((q, k))
    assert len(seen) >= 4


def test_arrows_step_a_token_and_the_link_follows(open_page, address):
    page = wait_until_settled(open_page(f"{address}#view=map&layer=0&head=1&q=6&k=3"))
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert (link(page)["q"], link(page)["k"]) == ("7", "5")
    wait_until_quiet(page)
    wait_until(page, "document.querySelector('.readout-pair').textContent.includes('7')")
    q, k, weight, _ = read(page)
    assert (q, k) == (7, 5)
    assert weight == expect_weight(Q, K, 0, 1, 7, 5)


def read_cell(page, x, y) -> tuple[int, ...]:
    """The query and the key that the page names where the pointer is; () where it is on none."""
    page.mouse.move(x, y)
    wait_until_quiet(page)
    return tuple(int(text) for text in page.locator(".readout-pair .numbers").all_inner_texts())


def test_a_heavier_weight_is_drawn_darker(open_page, address):
    page = wait_until_settled(open_page(f"{address}#view=map&layer=0&head=0&scale=linear"))
    expected = weights(Q, K, 0, 0)
    box = page.locator("canvas").bounding_box()
    points = {}
    for x, y in itertools.product((0.316, 0.352, 0.387, 0.423, 0.459, 0.495), (0.533, 0.592, 0.65, 0.709)):
        x, y = round(x * box["width"]), round(y * box["height"])
        cells = {read_cell(page, box["x"] + x + d, box["y"] + y + d) for d in (-5, 0, 5)}
        if len(cells) == 1 and (places := cells.pop()) and places[0] >= places[1]:  # what is looked at below lies in one cell
            points[x, y] = float(expected[places])
    page.mouse.move(1, 1)
    wait_until_quiet(wait_for_timers(page, 100))
    lights = page.evaluate(
        """(points) => {
            const canvas = document.querySelector("canvas"), wide = canvas.width;
            const data = canvas.getContext("2d").getImageData(0, 0, wide, canvas.height).data;
            const light = (x, y) => [0, 1, 2].reduce((sum, part) => sum + data[4 * (y * wide + x) + part], 0);
            const patch = Array.from({ length: 121 }, (_, n) => [n % 11 - 5, Math.floor(n / 11) - 5]);
            // the median is the ground of a cell, not its number
            return points.map(([x, y]) => patch.map(([dx, dy]) => light(x + dx, y + dy)).sort((a, b) => a - b)[60]);
        }""",
        list(points),
    )
    light = dict(zip(points, lights, strict=True))
    apart = [(a, b) for a, b in itertools.permutations(points, 2) if points[a] > points[b] + 0.05]
    assert len(apart) > 5
    assert all(light[a] < light[b] for a, b in apart)


def test_the_wheel_zooms_at_the_pointer_and_0_shows_all_again(open_page, address):
    page = wait_until_settled(open_page(f"{address}#view=map&r=r2"))
    box = page.locator("canvas").bounding_box()
    page.mouse.move(box["x"] + 0.36 * box["width"], box["y"] + 0.75 * box["height"])
    before = read(page)[:2]
    for _ in range(6):
        page.mouse.wheel(0, -240)
    wait_until(page, f"{ZOOM} > 4")  # on a slow machine the link is written between two turns of the wheel too
    page.mouse.move(box["x"] + 0.36 * box["width"] + 1, box["y"] + 0.75 * box["height"])
    wait_for_timers(page, 200)
    wait_until_quiet(page)
    assert max(abs(a - b) for a, b in zip(read(page)[:2], before, strict=True)) <= 1
    page.keyboard.press("0")
    wait_until(page, "!location.hash.includes('zoom=')")


def test_a_drag_pans_and_a_double_click_comes_closer(open_page, address):
    page = wait_until_settled(open_page(f"{address}#view=map&r=r2&x=350&y=350&zoom=8"))
    box = page.locator("canvas").bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x + 80, y + 40, steps=4)
    page.mouse.up()
    wait_until(page, "!location.hash.includes('x=350&')")
    assert float(link(page)["x"]) < 350
    assert float(link(page)["y"]) < 350
    page.mouse.dblclick(x, y)
    wait_until(page, f"{ZOOM} > 15")


def test_a_click_pins_what_hover_shows_and_back_lets_it_go(open_page, address):
    page = wait_until_settled(open_page(f"{address}#view=map&head=1"))
    box = page.locator("canvas").bounding_box()
    page.mouse.move(box["x"] + 0.45 * box["width"], box["y"] + 0.7 * box["height"])
    q, k, _, _ = read(page)
    page.mouse.down()
    page.mouse.up()
    wait_until(page, "location.hash.includes('q=')")
    assert (int(link(page).get("q", 0)), int(link(page).get("k", 0))) == (q, k)
    row = weights(Q, K, 0, 1)[q]
    page.wait_for_selector(".readout-links .link")
    assert int(page.locator(".readout-links .link .note").first.inner_text()) == int(row.argmax())
    page.go_back()
    wait_until(page, "!location.hash.includes('q=')")


def test_brackets_step_a_head_and_points_a_layer(open_page, address):
    page = wait_until_settled(open_page(f"{address}#view=map"))
    page.keyboard.press("]")
    page.keyboard.press("]")
    page.keyboard.press(".")
    assert (link(page)["head"], link(page)["layer"]) == ("2", "1")
    wait_until(page, "document.querySelector('#caption').textContent.includes('Layer 1, head 2')")
    page.keyboard.press("[")
    page.keyboard.press(",")
    wait_until(page, "document.querySelector('#caption').textContent.includes('Layer 0, head 1')")


def test_every_level_shows_the_same_lone_weight_where_max_is_asked_for(serving, open_page):
    t = 1100
    q, k = torch.zeros(1, 1, 1, t, 3), torch.zeros(1, 1, 1, t, 3)
    q[..., 900, 0], k[..., 123, 0] = 20.0, 20.0  # one query that sees one key alone
    page = wait_until_settled(open_page(f"{serving(Session(record_layers(q, k, space_words(PLAIN, t))))}#view=map&how=max"))
    colours = """() => {
        const canvas = document.querySelector("canvas");
        const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
        let dark = 0;
        const strong = (red, blue) => red < 60 && blue > 100 && blue - red > 50;
        for (let n = 0; n < pixels.length; n += 4) dark += strong(pixels[n], pixels[n + 2]);
        return dark;
    }"""
    wait_until(page, f"({colours})() > 0")


def test_a_tile_that_does_not_come_is_told_on_the_map_and_the_last_picture_stays(open_page, address):
    page = wait_until_settled(open_page(f"{address}#view=map&r=r2", quiet=False))
    page.route("**/tile?*", lambda route: route.abort())
    page.locator("canvas").focus()
    for _ in range(4):
        page.keyboard.press("+")
    wait_until(page, "location.hash.includes('zoom=')")  # the link stores the viewport, which dismisses nothing
    page.wait_for_selector("#stage .error")
    assert "does not answer" in page.locator("#stage .error").first.inner_text()
    assert page.evaluate(
        "[...document.querySelector('canvas').getContext('2d').getImageData(500, 300, 1, 1).data].some(Boolean)"
    )


def test_the_picture_is_kept_as_png_and_as_svg_that_names_the_words(open_page, address, tmp_path):
    page = wait_until_settled(open_page(f"{address}#view=map"))
    for kind in ("PNG", "SVG"):
        page.get_by_role("button", name="Save").click()
        with page.expect_download() as saving:
            page.get_by_role("menuitem", name=kind).click()
        saving.value.save_as(tmp_path / f"map.{kind.lower()}")
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
    svg = (tmp_path / "map.svg").read_text(encoding="utf-8")
    from xml.etree import ElementTree

    told = [element.text for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]
    assert "because" in told
    assert any("entropy" in text for text in told)
