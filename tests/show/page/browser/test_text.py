"""The Text view: what a word looked at is shaded by its weights, on six words and on many thousands."""

import itertools
import re

import pytest
import torch

from bounds import sum_bound
from regard.show.page.session import Session
from show.page.browser.page_waits import link, wait_until, wait_until_quiet, wait_until_settled
from show.page.browser.recordings import (
    EVIL,
    PLAIN,
    draw_queries_and_keys,
    expect_weight,
    record_layers,
    space_words,
    weight_bounds,
    weights,
)

HEADS, T, LONG = 3, 17, 9000
# whether a line of words stands in the middle of the window
MIDDLE = """(() => {
    const [window, ...lines] = [...document.querySelectorAll(".prose, .prose-line")].map((one) => one.getBoundingClientRect());
    const middle = (window.top + window.bottom) / 2;
    return lines.some(({top, bottom}) => top < middle + 20 && bottom > middle - 20);
})()"""
Q, K = draw_queries_and_keys(2, HEADS, T)


@pytest.fixture(scope="module")
def address(serving):
    session = Session(record_layers(Q, K, space_words(PLAIN, T)))
    session.add_recording(record_layers(*draw_queries_and_keys(1, 1, LONG, width=3), [f" w{n}" for n in range(LONG)]))
    session.add_recording(record_layers(*draw_queries_and_keys(1, 2, len(EVIL)), EVIL))
    return serving(session)


def light(page) -> list[int]:
    """How light the ground of each word is; -1 where it has none."""
    return page.evaluate(
        """() => [...document.querySelectorAll(".word")].map((word) =>
            (word.style.backgroundColor.match(/\\d+/g) ?? [-1]).reduce((sum, part) => sum + Number(part), 0))"""
    )


def darker(light: list[int], row) -> None:
    """Where one word has clearly more weight than another, it is darker; what may not be seen has no ground."""
    assert len(light) == len(row)
    for a, b in itertools.combinations(range(len(row)), 2):
        if row[a] > row[b] + 0.05:
            assert light[a] < light[b]


def test_hovering_a_word_shades_what_it_looked_at(open_page, address):
    page = wait_until_settled(open_page(f"{address}#view=text&layer=1&head=2"))
    page.locator(".word[data-n='11']").hover()
    wait_until(page, "document.querySelector('#caption').textContent.includes('token 11')")
    wait_until_quiet(page)
    row = weights(Q, K, 1, 2)[11]
    seen = light(page)
    darker(seen[:12], row[:12])
    assert seen[12:] == [-1] * (T - 12)
    wait_until(page, "document.querySelector('.text-links h2').textContent.includes('attends most to')")
    wait_until(page, "document.querySelector('.text-links .link')")
    first = page.locator(".text-links .link").first
    wait_until(page, f"document.querySelector('.text-links .note').textContent === '{int(row.argmax())}'")
    assert float(first.get_attribute("title")) == expect_weight(Q, K, 1, 2, 11, int(row.argmax()))


def test_the_other_way_shades_what_looked_at_it(open_page, address):
    page = wait_until_settled(open_page(f"{address}#view=text&head=1&q=4"))
    page.get_by_role("button", name="what attends to it").click()
    wait_until(page, "document.querySelector('#caption').textContent.includes('how much it attends to')")
    wait_until_quiet(page)
    seen = light(page)
    assert seen[:4] == [-1] * 4
    darker(seen[4:], weights(Q, K, 0, 1)[4:, 4])


def test_several_heads_show_their_mean(open_page, address):
    page = wait_until_settled(open_page(f"{address}#view=text&head=0&q=12"))
    page.get_by_role("button", name="2", exact=True).click()
    wait_until(page, "document.querySelector('#caption').textContent.includes('mean of heads 0, 2')")
    wait_until_quiet(page)
    both, allowed = ((found(Q, K, 0, 0)[12] + found(Q, K, 0, 2)[12]) / 2 for found in (weights, weight_bounds))
    darker(light(page)[:13], both[:13])
    wait_until(page, f"document.querySelector('.text-links .note').textContent === '{int(both.argmax())}'")
    found = float(page.locator(".text-links .link").first.get_attribute("title"))
    rounded = sum_bound(torch.float32, 1, float(both.max()))  # the mean of the two
    assert found == pytest.approx(float(both.max()), abs=float(allowed[both.argmax()]) + rounded)
    assert link(page)["heads"] == "0,2"


def test_a_word_picked_in_the_text_is_the_row_of_the_map(open_page, address):
    page = wait_until_settled(open_page(f"{address}#view=text"))
    page.locator(".word[data-n='9']").click()
    assert link(page)["q"] == "9"
    page.get_by_role("link", name="Map").click()
    wait_until(page, "document.querySelector('.readout-links h2')")
    assert link(page)["q"] == "9"
    page.go_back()
    wait_until(page, "document.querySelector('.word.selected')?.dataset.n === '9'")


def test_arrows_step_a_word_and_escape_lets_it_go(open_page, address):
    page = wait_until_settled(open_page(f"{address}#view=text&q=3"))
    for key, expected in (("ArrowRight", "4"), ("ArrowLeft", "3"), ("End", str(T - 1)), ("Home", "0")):
        page.keyboard.press(key)
        assert link(page).get("q") == expected
    page.keyboard.press("Escape")
    assert "q" not in link(page)


def test_a_long_text_scrolls_with_few_words_on_the_page(open_page, address):
    page = wait_until_settled(open_page(f"{address}#view=text&r=r2"))
    most = 0
    for share in (0.2, 0.5, 0.8, 1.0):
        page.evaluate(
            f"(() => {{ const one = document.querySelector('.prose'); one.scrollTop = {share} * one.scrollHeight; }})()"
        )
        wait_until(page, MIDDLE)
        wait_until_quiet(page)
        most = max(most, page.locator(".word").count())
    page.evaluate("(() => { const one = document.querySelector('.prose'); one.scrollTop = one.scrollHeight; })()")
    wait_until(page, f"document.querySelector(\".word[data-n='{LONG - 1}']\")")
    assert page.locator(f".word[data-n='{LONG - 1}']").inner_text().strip() == f"w{LONG - 1}"
    assert most < 1500


def test_words_that_break_pages_are_shown_as_text(open_page, address):
    page = wait_until_settled(open_page(f"{address}#view=text&r=r3"))
    assert page.locator(".word").count() == len(EVIL)
    assert page.locator("#stage img, #stage script").count() == 0
    told = page.locator(".word").all_inner_texts()
    assert told[0] == "</script>"
    assert told[1] == "<img src=x onerror=alert(1)>"
    assert re.search("202E.*right", told[2], re.DOTALL)
    assert "0000" in told[3]


def test_a_word_is_found_by_its_letters(open_page, address):
    page = wait_until_settled(open_page(f"{address}#view=text&r=r2"))
    page.keyboard.press("/")
    page.get_by_role("searchbox").fill("w8765")
    wait_until(page, "document.querySelectorAll('.found button').length === 1")
    assert page.locator(".found button span >> nth=1").inner_text() == "w8764 w8765 w8766"
    page.keyboard.press("Enter")
    wait_until(page, "location.hash.includes('q=8765')")
    wait_until(page, "document.querySelector('.word.selected')?.textContent === ' w8765'")
