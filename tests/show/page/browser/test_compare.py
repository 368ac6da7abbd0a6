"""The Compare view: two heads, prompts or recordings and their difference, the numbers attend's, by mouse and by keyboard."""

import itertools
import re

import pytest

from regard.models import GPT2
from regard.show.page.model_adapter import adapt_model
from regard.show.page.session import Session
from show.page.browser.page_waits import link, wait_until, wait_until_quiet
from show.page.browser.problems import call_function
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


def find_rounded_cell():
    """Two heads and one of their largest differences, whose first weight has other digits in the picture."""
    for one, other in itertools.permutations(itertools.product(range(LAYERS), range(HEADS)), 2):
        a, b = weights(Q, K, *one), weights(Q, K, *other)
        coded = 2 ** ((2048 * a.log2()).round() / 2048)
        for place in (b - a).abs().flatten().topk(6).indices.tolist():
            q, k = divmod(place, T)
            if f"{a[q, k]:.3g}" != f"{coded[q, k]:.3g}":
                return one, other, q, k, a[q, k], b[q, k]
    raise AssertionError("no such cell")


def test_the_weights_of_a_link_are_exact_where_those_of_the_picture_round_to_another_digit(open_page, address):
    (layer, head), (layer2, head2), q, k, a, b = find_rounded_cell()
    state = f"layer={layer}&head={head}&layer2={layer2}&head2={head2}&q={q}&k={k}"
    page = wait_until_drawn(open_page(f"{address}#view=compare&r=r1&{state}"))
    page.wait_for_selector(".compare-read .note")
    expected = {"first": a, "second": b, "difference": b - a}
    assert read(page) == {name: float(f"{value:.3g}") for name, value in expected.items()}
    listed = page.locator(".compare-place .numbers:nth-child(2)").all_inner_texts()
    assert f"{a:#.3g} → {b:#.3g}" in listed


def test_how_much_attention_lies_elsewhere_is_said(open_page, address):
    page = wait_until_drawn(open_page(f"{address}#view=compare&r=r1&layer=1&head=0&layer2=0&head2=2"))
    share = float(re.search(r"0\.\d+", page.locator(".compare-told").inner_text())[0])
    assert share == expect_moved((Q, K, 1, 0), (Q, K, 0, 2))


def test_a_head_and_itself_attend_alike(open_page, address):
    page = wait_until_drawn(open_page(f"{address}#view=compare&r=r1&layer=1&head=1&layer2=1&head2=1"))
    assert page.locator(".compare-told").inner_text() == "The two have equal weights."


def test_the_places_that_differ_most_are_listed_and_lead_there(open_page, address):
    page = wait_until_drawn(open_page(f"{address}#view=compare&r=r1&layer=1&head=0&layer2=0&head2=2"))
    apart = weights(Q, K, 0, 2) - weights(Q, K, 1, 0)
    shown = [text.replace("−", "-") for text in page.locator(".compare-place .numbers:last-child").all_inner_texts()]
    allowed = code_bounds(Q, K, 0, 2) + code_bounds(Q, K, 1, 0)
    places = apart.abs().flatten().argsort(descending=True)[:6].tolist()
    assert [float(text) for text in shown] == [expect_digits(apart.flatten()[n], allowed.flatten()[n]) for n in places]
    page.locator(".compare-place").first.click()
    assert [int(link(page)[name]) for name in "qk"] == list(divmod(int(apart.abs().argmax()), T))


def test_words_that_look_alike_are_told_apart_by_their_places(open_page, address):
    words = [word.strip() for word in space_words(PLAIN, T)]  # "the" stands at 0, without a space, and at 4
    page = wait_until_drawn(open_page(f"{address}#view=compare&r=r1&q=4&k=1"))
    assert page.locator(".compare-read > b").first.inner_text() == "‘the’ at 4 → ‘cat’"
    named = [
        part.strip().split(" at ")
        for one in page.locator(".compare-place > span:first-child").all_inner_texts()
        for part in one.split("→")
    ]
    assert any(word == "the" for word, *_ in named)
    for word, *place in named:
        assert bool(place) == (words.count(word) > 1)
        assert all(words[int(one)] == word for one in place)


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


def test_prompts_with_nothing_in_common_are_told_apart_in_words(open_page, address):
    page = wait_until_drawn(open_page(f"{address}#view=compare&r=r1&r2=r4"), panes=2)
    assert "They have different beginnings" in page.locator(".compare-page > .note").inner_text()


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


def test_what_is_compared_of_two_translations_of_one_sentence_is_said_of_the_translations(open_page, address):
    source, first = list("abcd"), list("uvw")
    texts = [{"rows": rows, "columns": source} for rows in (first, list("uxy"), list("uvwxy"), list("xvw"))]
    found = call_function(open_page(address), "views/compare/difference", "matchWords", [[texts[0], one] for one in texts])
    assert [(one["rows"], one["columns"]) for one in found] == [(3, 4)] * 4
    assert [one["said"] for one in found] == [
        "",
        "Both have 3 tokens, 2 of which are different: the difference is computed position by position.",
        "The first text has 3 tokens, the second 5. The first 3 are the same; the difference is computed for these.",
        "Both have 3 tokens, 1 of which is different: the difference is computed position by position.",
    ]
