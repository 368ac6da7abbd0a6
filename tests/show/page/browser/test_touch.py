"""The page under fingers, on a phone: tap, drag, pinch and scroll do what mouse and keys do."""

import re

import pytest

from regard.models import GPT2
from regard.show.page.model_adapter import adapt_model
from regard.show.page.session import Session
from show.page.browser.page_waits import link, wait_for_timers, wait_until, wait_until_quiet, wait_until_settled
from show.page.browser.recordings import (
    PLAIN,
    code_bounds,
    draw_queries_and_keys,
    expect_digits,
    expect_weight,
    record_layers,
    space_words,
    weights,
)
from show.page.browser.touch import middle, move_fingers, way

HEADS, T, LONG = 3, 13, 600
Q, K = draw_queries_and_keys(2, HEADS, T)


@pytest.fixture(scope="module")
def address(serving):
    session = Session(record_layers(Q, K, space_words(PLAIN, T)), adapt_model(GPT2.load("sorter")))
    session.add_recording(record_layers(*draw_queries_and_keys(1, 1, LONG, seed=3), space_words(PLAIN, LONG)))
    return serving(session)


@pytest.fixture
def phone(open_page, address):
    """phone(state) is the page at a link, on a phone that has fingers and no mouse."""

    def page_of(state: str):
        page = open_page(f"{address}#{state}", width=390, height=844, has_touch=True, is_mobile=True)
        return (
            wait_until_quiet(page) if "generate" in state else wait_until_settled(page)
        )  # which says nothing before it has written

    return page_of


def read_camera(page) -> dict[str, float]:
    """Where the map's camera stands, once it rests and the link says so."""
    wait_for_timers(page, 500)
    return {name: float(value) for name, value in link(page).items() if name in ("x", "y", "zoom")}


def test_two_fingers_zoom_the_map_about_what_lies_between_them(phone):
    page = phone("view=map&r=r2")
    x, y = middle(page.locator("canvas"))
    x, y = x + (74 - 30) / 2, y + (66 - 40) / 2  # the middle of the plane, between the margins of a narrow map
    move_fingers(page, way((x - 20, y), (x - 60, y)), way((x + 20, y), (x + 60, y)))
    near = read_camera(page)
    assert near["zoom"] == pytest.approx(3, rel=0.1)  # fingers 40 pixels apart are 120 apart
    assert near["x"] == pytest.approx(LONG / 2, rel=0.05)
    move_fingers(page, way((x, y - 60), (x, y - 30)), way((x, y + 60), (x, y + 30)))
    assert read_camera(page)["zoom"] == pytest.approx(near["zoom"] / 2, rel=0.1)
    assert "q" not in link(page)  # a pinch picks nothing


def test_one_finger_drags_the_map_and_picks_nothing(phone):
    page = phone("view=map&r=r2&x=300&y=300&zoom=6")
    x, y = middle(page.locator("canvas"))
    move_fingers(page, way((x, y), (x - 60, y - 40)))
    there = read_camera(page)
    assert there["x"] > 305
    assert there["y"] > 305
    assert (there["x"] - 300) / (there["y"] - 300) == pytest.approx(60 / 40, rel=0.1)
    assert "q" not in link(page)


def test_a_tap_on_the_map_reads_and_keeps_a_weight(phone):
    page = phone("view=map&layer=1&head=2")
    assert "Tap the map" in page.locator(".readout-pair").inner_text()
    x, y = middle(page.locator("canvas"))
    page.touchscreen.tap(x - 40, y + 40)
    wait_until(page, "document.querySelector('.readout dd').title !== ''")
    q, k = int(link(page)["q"]), int(link(page)["k"])
    told = float(page.locator(".readout dd").first.get_attribute("title").split()[0])
    assert told == expect_weight(Q, K, 1, 2, q, k)


def test_a_tap_picks_a_word_of_the_text_and_another_lets_it_go(phone):
    page = phone("view=text&layer=1&head=2")
    page.locator(".word[data-n='5']").tap()
    wait_until(page, "document.querySelector('.word.selected')?.dataset.n === '5'")
    assert link(page)["q"] == "5"
    page.locator(".word[data-n='5']").tap()
    wait_until(page, "!location.hash.includes('q=')")


def test_a_finger_scrolls_the_text_and_picks_nothing(phone):
    page = phone("view=text&r=r2")
    x, y = middle(page.locator(".prose"))
    move_fingers(page, way((x, y + 80), (x, y - 80)))
    wait_until(page, "document.querySelector('.prose').scrollTop > 60")
    assert "q" not in link(page)


def test_a_tap_on_a_head_opens_its_map(phone):
    page = phone("view=heads")
    page.locator("[data-layer='1'][data-head='1']").tap()
    wait_until(page, "location.hash.includes('view=map')")
    assert {name: link(page)[name] for name in ("layer", "head")} == {"layer": "1", "head": "1"}


def test_a_tap_picks_a_number_of_the_steps(phone):
    page = phone("view=steps&layer=1&head=2&step=weights")
    page.locator(".panel tbody tr").nth(3).locator("td").nth(2).tap()
    wait_until(page, "location.hash.includes('k=2')")
    wait_until_quiet(page)
    assert float(page.locator(".steps-sum span").get_attribute("title")) == pytest.approx(
        float(weights(Q, K, 1, 2)[3, 2]), rel=1e-9
    )


def test_a_phone_compares_one_picture_at_a_time_and_a_tap_reads_both_sides(phone):
    page = phone("view=compare&layer=1&head=0&head2=2")
    wait_until(page, "document.querySelectorAll('.compare-scale .legend').length === 3")
    assert page.locator(".compare-pane:visible h2").all_inner_texts() == ["second − first"]
    page.get_by_role("button", name="first", exact=True).tap()
    wait_until(page, "document.querySelector('.compare-pane').checkVisibility()")
    assert page.locator(".compare-pane:visible h2").all_inner_texts() == ["first"]
    box = page.locator(".compare-frame:visible").bounding_box()
    assert box["width"] > 250
    page.touchscreen.tap(box["x"] + 2.5 / T * box["width"], box["y"] + 6.5 / T * box["height"])
    wait_until(page, "location.hash.includes('k=2')")
    wait_until_quiet(page)
    assert link(page)["q"] == "6"
    told = float(re.search(r"first\s+(0\.\d+)", page.locator(".compare-read").inner_text())[1])
    assert told == expect_digits(*(found(Q, K, 1, 0)[6, 2] for found in (weights, code_bounds)))


def test_words_are_typed_and_picked_by_taps(phone):
    page = phone("view=type&r=r1&layer=1")
    page.get_by_role("textbox", name="Your text").fill("CBABBC")
    page.get_by_role("button", name="Run", exact=True).tap()
    wait_until(page, "document.querySelectorAll('.type-words .word').length === 6")
    page.locator(".type-words .word").nth(2).tap()
    wait_until(page, "location.hash.includes('q=2')")
    wait_until_quiet(page)
    assert page.locator(".type-words [aria-pressed]").inner_text() == "A"


@pytest.mark.parametrize("view", ["type", "text", "heads", "map", "steps", "compare", "generate"])
def test_what_is_tapped_is_large_enough_for_a_finger(phone, view):
    page = phone(f"view={view}&r=r1")
    small = page.evaluate(
        """() => [...document.querySelectorAll("button, a[href], select, summary, input:not([type=range], [type=checkbox])")]
            .filter((one) => one.checkVisibility() && !one.closest(".panel, .words"))
            .map((one) => [one.getBoundingClientRect(), one])
            .filter(([box]) => box.width && (box.width < 24 || box.height < 24))
            .map(([{width, height}, one]) => `${width} x ${height} ${one.outerHTML.slice(0, 80)}`)"""
    )
    assert small == []  # WCAG 2.2, target size, AA
