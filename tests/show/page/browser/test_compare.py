"""The Compare view: two heads, prompts or recordings and their difference, the numbers attend's, by mouse and by keyboard."""

import re

import pytest

from regard.models import GPT2
from regard.show.page.model_adapter import adapt_model
from regard.show.page.session import Session
from show.page.browser.page_waits import link, wait_until, wait_until_quiet
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

LAYERS, HEADS, T = 2, 3, 7
Q, K = draw_queries_and_keys(LAYERS, HEADS, T)
OTHER = draw_queries_and_keys(LAYERS, HEADS, T, seed=4)
LONGER = draw_queries_and_keys(LAYERS, HEADS, 11, seed=5)
LONG = draw_queries_and_keys(1, 2, 600, seed=6)


@pytest.fixture(scope="module")
def address(serving):
    words = space_words(PLAIN, T)
    session = Session(record_layers(Q, K, words), adapt_model(GPT2.load("sorter")))
    session.add_recording(record_layers(*OTHER, [*words[:-1], " dog"]))
    session.add_recording(record_layers(*LONGER, [*words[:5], *space_words(PLAIN[::-1], 6)]))
    session.add_recording(record_layers(*LONGER, space_words(PLAIN[::-1], 11)))
    session.add_recording(record_layers(*LONG, space_words(PLAIN, 600)))
    return serving(session)


def wait_until_drawn(page, panes: int = 3):
    wait_until(page, f"document.querySelectorAll('.compare-pane:not([hidden]) .compare-scale .legend').length === {panes}")
    wait_until_quiet(page)
    return page


def read(page) -> dict[str, float]:
    """The numbers of the line that reads both sides, by name."""
    text = page.locator(".compare-read").inner_text().replace("−", "-")
    return {
        name: float(value) for name, value in re.findall(r"(first|second|difference)\s+(\+?-?[\d.]+(?:e-?\d+)?)(?!\d)", text)
    }


def expect_both(first: tuple, second: tuple, q: int, k: int):
    """What the page may read at a place of two heads."""
    (a, b), (off, other) = ([found(*side)[q, k] for side in (first, second)] for found in (weights, code_bounds))
    return {"first": expect_digits(a, off), "second": expect_digits(b, other), "difference": expect_digits(b - a, off + other)}


def expect_moved(first: tuple, second: tuple, tokens: int = T):
    """How much of the attention lies elsewhere in the second head, over the first tokens."""
    (a, b), (off, other) = ([found(*side)[:tokens, :tokens] for side in (first, second)] for found in (weights, code_bounds))
    return expect_digits((a - b).abs().sum(-1).mean() / 2, (off + other).sum(-1).mean() / 2)


def test_a_link_reads_a_weight_of_both_heads(open_page, address):
    page = wait_until_drawn(open_page(f"{address}#view=compare&r=r1&layer=1&head=0&layer2=0&head2=2&q=5&k=3"))
    assert read(page) == expect_both((Q, K, 1, 0), (Q, K, 0, 2), 5, 3)
    page.wait_for_selector(".compare-read .note")
    exact = page.locator(".compare-read .note").evaluate_all("(all) => all.map((one) => Number(one.title))")  # on pointing
    assert exact == [expect_weight(Q, K, 1, 0, 5, 3), expect_weight(Q, K, 0, 2, 5, 3)]


def test_the_places_that_differ_most_are_listed_and_lead_there(open_page, address):
    page = wait_until_drawn(open_page(f"{address}#view=compare&r=r1&layer=1&head=0&layer2=0&head2=2"))
    apart = weights(Q, K, 0, 2) - weights(Q, K, 1, 0)
    shown = [text.replace("−", "-") for text in page.locator(".compare-place .numbers:last-child").all_inner_texts()]
    allowed = code_bounds(Q, K, 0, 2) + code_bounds(Q, K, 1, 0)
    places = apart.abs().flatten().argsort(descending=True)[:6].tolist()
    assert [float(text) for text in shown] == [expect_digits(apart.flatten()[n], allowed.flatten()[n]) for n in places]
    page.locator(".compare-place").first.click()
    assert [int(link(page)[name]) for name in "qk"] == list(divmod(int(apart.abs().argmax()), T))


def test_pointing_reads_and_a_click_pins_and_arrows_step(open_page, address):
    page = wait_until_drawn(open_page(f"{address}#view=compare&r=r1&layer=1&head=0&layer2=0&head2=2"))
    page.locator(".compare-frame").first.scroll_into_view_if_needed()
    box = page.locator(".compare-frame").first.bounding_box()

    def locate_entry(q: float, k: float) -> tuple[float, float]:
        return box["x"] + (k + 0.5) / T * box["width"], box["y"] + (q + 0.5) / T * box["height"]

    page.mouse.move(*locate_entry(4, 2))
    assert read(page)["first"] == expect_both((Q, K, 1, 0), (Q, K, 0, 2), 4, 2)["first"]
    page.mouse.click(*locate_entry(6, 1))
    assert {name: link(page)[name] for name in "qk"} == {"q": "6", "k": "1"}
    page.mouse.move(0, 0)
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowRight")
    assert {name: link(page)[name] for name in "qk"} == {"q": "5", "k": "2"}
    assert read(page)["second"] == expect_both((Q, K, 1, 0), (Q, K, 0, 2), 5, 2)["second"]


def test_each_side_has_its_own_head_and_they_change_places(open_page, address):
    page = wait_until_drawn(open_page(f"{address}#view=compare&r=r1&layer=1&head=0&layer2=0&head2=2&q=5&k=3"))
    before = read(page)
    page.keyboard.press("x")
    wait_until(page, "!document.querySelector('.compare-read').innerText.includes('difference')")
    page.evaluate("location.hash += '&q=5&k=3'")
    wait_until(page, "document.querySelector('.compare-read').innerText.includes('difference')")
    assert read(page) == {"first": before["second"], "second": before["first"], "difference": -before["difference"]}
    picks = page.locator(".compare-pane").nth(1).locator("select[data-pick='second head']")
    picks.select_option("2")
    wait_until_quiet(page)
    asked = {"layer": "0", "head": "2", "layer2": "1", "head2": "2"}
    assert {name: link(page).get(name, "0") for name in asked} == asked
    page.keyboard.press("Escape")


def test_prompts_of_one_length_are_compared_place_by_place(open_page, address):
    page = wait_until_drawn(open_page(f"{address}#view=compare&r=r1&layer=1&r2=r2&layer2=1&head2=0"))
    assert page.locator(".compare-page > .note").inner_text() == (
        f"Both have {T} tokens, 1 of which is different: the difference is computed position by position."
    )
    share = float(re.search(r"0\.\d+", page.locator(".compare-told").inner_text())[0])
    assert share == expect_moved((Q, K, 1, 0), (*OTHER, 1, 0))


def test_prompts_that_begin_alike_are_compared_so_far(open_page, address):
    page = wait_until_drawn(open_page(f"{address}#view=compare&r=r1&layer=1&r2=r3&layer2=1&head2=0"))
    assert page.locator(".compare-page > .note").inner_text() == (
        f"The first text has {T} tokens, the second 11. The first 5 are the same; the difference is computed for these."
    )
    share = float(re.search(r"0\.\d+", page.locator(".compare-told").inner_text())[0])
    assert share == expect_moved((Q, K, 1, 0), (*LONGER, 1, 0), 5)


def test_a_long_text_is_compared_in_pixels_of_several_weights(open_page, address):
    page = wait_until_drawn(open_page(f"{address}#view=compare&r=r5&head=0&head2=1&q=560&k=520"))
    (a, b), (off, other) = (
        [found(*LONG, 0, head).view(300, 2, 300, 2).mean((1, 3))[280, 260] for head in (0, 1)]
        for found in (weights, code_bounds)
    )
    assert read(page) == {
        "first": expect_digits(a, off),
        "second": expect_digits(b, other),
        "difference": expect_digits(b - a, off + other),
    }
    assert "mean of 2 by 2 weights" in page.locator(".compare-told").inner_text()


def test_another_text_is_run_for_the_second_side(open_page, address):
    page = wait_until_drawn(open_page(f"{address}#view=compare&r=r1"))
    page.get_by_role("textbox", name="Another text").fill("CBA")
    page.keyboard.press("Enter")
    wait_until(page, "location.hash.includes('r2=gpt-2-cba-') && location.hash.includes('text2=CBA')")
    wait_until_drawn(page, panes=2)
    assert page.locator(".compare-page > .note").inner_text().startswith(f"The first text has {T} tokens, the second 3.")


def test_on_a_phone_the_pictures_stand_one_at_a_time_in_the_same_place(open_page, address):
    page = wait_until_drawn(open_page(f"{address}#view=compare&r=r1&layer=1", width=390, height=844))
    assert page.evaluate("document.querySelector('#stage').scrollWidth <= innerWidth")
    for name, number in (("first", "0"), ("second", "1"), ("second − first", None)):
        page.locator(".compare-turn").get_by_role("button", name=name, exact=True).click()
        assert page.locator(".compare-pane:visible h2").all_inner_texts() == [name]
        assert link(page).get("pane") == number
