"""How the page looks: at a phone's width, on both grounds, its keys, the pictures that are kept, its links."""

import pytest

from regard.show.page.session import Session
from show.page.browser.page_waits import wait_for_timers, wait_until, wait_until_settled
from show.page.browser.recordings import PLAIN, draw_queries_and_keys, record_layers, space_words

VIEWS = ("text", "heads", "map")
LUMINANCE = """(colour) => {
    const linear = (part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = colour.match(/[\\d.]+/g).map((part) => linear(part / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}"""


@pytest.fixture(scope="module")
def address(serving):
    session = Session(record_layers(*draw_queries_and_keys(3, 6, 300), space_words(PLAIN, 300)))
    session.add_recording(record_layers(*draw_queries_and_keys(2, 2, 6), space_words(PLAIN, 6)))
    return serving(session)


@pytest.mark.parametrize("view", VIEWS)
def test_nothing_is_wider_than_a_phone(open_page, address, view):
    page = wait_until_settled(open_page(f"{address}#view={view}", width=390, height=844))
    wide = """() => [...document.querySelectorAll("body *")].filter((one) => !one.closest("nav, .chips, [hidden]") &&
        one.getBoundingClientRect().right > innerWidth + 1 && getComputedStyle(one).visibility !== "hidden")
        .map((one) => one.outerHTML.slice(0, 120))"""
    assert page.evaluate(wide) == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_dark_page_is_dark_and_the_light_one_light(open_page, address):
    ground = f"({LUMINANCE})(getComputedStyle(document.documentElement).backgroundColor)"
    assert wait_until_settled(open_page(f"{address}#view=map")).evaluate(ground) > 0.8
    assert wait_until_settled(open_page(f"{address}#view=map", dark=True)).evaluate(ground) < 0.05


@pytest.mark.parametrize("dark", [False, True])
def test_what_is_hidden_is_not_taken_for_a_weight_of_0(open_page, address, dark):
    page = wait_until_settled(open_page(f"{address}#view=map&r=r2", dark=dark))
    hidden, zero = page.evaluate(
        """() => {
            const style = getComputedStyle(document.querySelector(".ramp"));
            const parts = (colour) => colour.match(/\\d+/g).slice(0, 3).map(Number);
            const probe = document.body.appendChild(document.createElement("i"));
            probe.style.color = "var(--hidden)";
            return [getComputedStyle(probe).color, style.backgroundImage.match(/rgb.*?\\)/)[0]].map(parts);
        }"""
    )
    assert (zero[2] - zero[0]) - (hidden[2] - hidden[0]) >= 20  # one is blue, the other is not


@pytest.mark.parametrize("view", VIEWS)
def test_the_list_of_keys_opens_and_closes(open_page, address, view):
    page = wait_until_settled(open_page(f"{address}#view={view}"))
    page.keyboard.press("?")
    dialog = page.get_by_role("dialog")
    assert "find a token" in dialog.inner_text()
    page.keyboard.press("Escape")
    wait_until(page, "!document.querySelector('dialog')")


def test_every_view_can_be_reached_with_the_tab_key_and_its_focus_is_seen(open_page, address):
    page = wait_until_settled(open_page(f"{address}#view=text"))
    page.locator("#views a").first.focus()
    page.keyboard.press("Tab")
    focused = "[document.activeElement.textContent, getComputedStyle(document.activeElement).outlineStyle]"
    assert page.evaluate(focused) == ["Heads", "solid"]
    page.keyboard.press("Enter")
    wait_until(page, "location.hash.includes('view=heads')")


def test_nothing_moves_for_those_who_ask_for_stillness(open_page, address):
    page = wait_until_settled(open_page(f"{address}#view=text", reduced_motion="reduce"))
    moving = (
        "[...document.querySelectorAll('*')].filter((one) => parseFloat(getComputedStyle(one).transitionDuration) > 0).length"
    )
    assert page.evaluate(moving) == 0


def test_a_link_holds_the_whole_state(open_page, address):
    state = "view=map&layer=2&head=4&q=120&k=60&x=110&y=130&zoom=5&how=max&scale=linear"
    page = wait_until_settled(open_page(f"{address}#{state}"))
    wait_for_timers(page, 500)  # the link follows where one stands a little later
    assert page.evaluate("location.hash").removeprefix("#") == state
    pressed = page.locator("[aria-pressed='true']").all_inner_texts()
    assert pressed == ["weight", "max", "linear"]
