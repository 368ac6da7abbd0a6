"""Where everything stands: nothing is cut, and a screen is used, from a phone to a wide one and at 200 %."""

import itertools

import pytest

from regard.models import GPT2
from regard.models.gpt2_adapter import GPT2Adapter
from regard.show.page.session import Session
from show.page.browser.page_waits import wait_until, wait_until_quiet, wait_until_settled
from show.page.browser.recordings import PLAIN, draw_queries_and_keys, record_layers, space_words

TEXT = "Lily had a red ball and Tom had a blue ball. Lily gave her red ball to Tom, and Tom gave his blue ball to Lily."
VIEWS = ("type", "text", "heads", "map", "steps", "compare", "generate")
SCREENS = {
    "laptop": (1280, 800),
    "wide": (1920, 1080),
    "phone": (390, 844),
    "landscape": (844, 390),
    "zoomed": (640, 400),
}  # zoomed: 1280 x 800 at 200 %
SELECTED = "r=r1&layer=3&head=1&q=18&k=3"
# labels whose text is wider than their box, and choices whose text is wider than their select
CUT = """() => {
    const isCut = (one) => {
        const isClipped = getComputedStyle(one).overflow !== "visible";
        if (one.tagName !== "SELECT") return isClipped && one.scrollWidth > one.clientWidth + 1;
        const box = one.getBoundingClientRect().width;
        const before = one.style.cssText;
        one.style.cssText = "field-sizing: content; width: auto; max-width: none; flex: none";
        const natural = one.getBoundingClientRect().width;
        one.style.cssText = before;
        return natural > box + 1;
    };
    const labels = "button, .button, label, .name, .note, h1, h2, h3, select, legend, figcaption, summary";
    return [...document.querySelectorAll(`${labels}, .legend span, .legend div`)]
        .filter((one) => one.checkVisibility() && !one.closest("#tools, .steps-names, .panel, .link"))
        .filter(isCut).map((one) => one.outerHTML.slice(0, 160));
}"""
CROWDED = """() => [...document.querySelectorAll(".ticks")].filter((one) => one.checkVisibility()).flatMap((ticks) => {
    const boxes = [...ticks.children].filter((one) => one.checkVisibility()).map((one) => one.getBoundingClientRect());
    return boxes.flatMap((box, n) => (n && box.left < boxes[n - 1].right + 3 ? [ticks.textContent] : []));
})"""
LINES = """(selector) => {
    const all = [...document.querySelectorAll(selector)].filter((one) => one.checkVisibility());
    const boxes = all.map((one) => one.getBoundingClientRect());
    const middles = boxes.map((box) => (box.top + box.bottom) / 2).sort((a, b) => a - b);
    return middles.filter((one, n) => !n || one - middles[n - 1] > 12).length;
}"""
WIDTH = """(selectors) => {
    const all = selectors.flatMap((one) => [...document.querySelectorAll(one)]);
    const boxes = all.filter((one) => one.checkVisibility()).map((one) => one.getBoundingClientRect());
    return Math.max(...boxes.map(({right}) => right)) - Math.min(...boxes.map(({left}) => left));
}"""


@pytest.fixture(scope="module")
def address(serving):
    session = Session(None, GPT2Adapter("pocket", GPT2.load("pocket")))
    session.run_text(TEXT, lambda: None)
    return serving(session)


@pytest.fixture
def open_view(open_page, address):
    """open_view(view, screen, more) is the page with the view drawn, Generate with what it wrote."""

    def page_of(view: str, screen: str, more: str = ""):
        width, height = SCREENS[screen]
        page = wait_for_view(open_page(f"{address}#view={view}&{SELECTED}{more}", width=width, height=height), view)
        if view == "generate":
            page.get_by_role("textbox", name="Prompt").fill("Once upon a time")
            page.locator("select[name=tokens]").select_option("20")
            page.get_by_role("button", name="Generate").click()
            page.wait_for_selector(".generate-after a")
        return wait_until_quiet(page)

    return page_of


def wait_for_view(page, view):
    return wait_until_quiet(page) if view == "generate" else wait_until_settled(page)


@pytest.mark.parametrize(("view", "screen"), list(itertools.product(VIEWS, SCREENS)))
def test_no_label_is_cut(open_view, view, screen):
    assert open_view(view, screen).evaluate(CUT) == []


@pytest.mark.parametrize(("view", "screen"), list(itertools.product(["text", "heads", "map", "compare"], SCREENS)))
def test_the_choice_of_a_logit_is_not_cut_and_numbers_of_a_signed_legend_keep_apart(open_view, view, screen):
    page = open_view(view, screen, "&show=pull")
    wait_until(page, "document.querySelector('[aria-label=\"Next word\"]').value !== '…'")
    assert page.evaluate(CUT) == []
    assert page.locator(".ticks").count() > 0
    assert page.evaluate(CROWDED) == []


@pytest.mark.parametrize("setting", ["pull", "cut"])
@pytest.mark.parametrize("view", ["text", "heads", "map", "steps", "compare"])
def test_the_controls_of_a_phone_take_two_lines_at_most_with_the_choice_of_a_logit(open_view, view, setting):
    page = open_view(view, "phone", f"&show={setting}")
    wait_until(page, "document.querySelector('[aria-label=\"Next word\"]').value !== '…'")
    assert page.locator("#bar select[data-control=show]").input_value() == setting
    assert page.evaluate(LINES, "#bar > .control") <= 2
    outside = "[...document.querySelectorAll('#bar *')].filter((one) => one.getBoundingClientRect().right > innerWidth).length"
    assert page.evaluate(outside) == 0


@pytest.mark.parametrize(("view", "words"), [("type", ".type-words"), ("generate", ".generate-words")])
@pytest.mark.parametrize("screen", ["laptop", "phone", "zoomed"])
def test_no_word_of_a_text_is_torn_apart_at_the_end_of_a_line(open_view, view, words, screen):
    page = open_view(view, screen)
    torn = "(all) => all.filter((one) => one.getClientRects().length > 1).map((one) => one.textContent)"
    assert page.locator(f"{words} .word").count() > 10
    assert page.locator(f"{words} .word").evaluate_all(torn) == []
    lines = len(set(page.locator(f"{words} .word").evaluate_all("(all) => all.map((one) => one.getBoundingClientRect().top)")))
    assert lines > 1
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_words_of_a_finding_are_in_sight_at_a_zoom_of_200_percent(open_page, address):
    page = wait_until_settled(open_page(f"{address}#view=text&r=r1&find=clearest", width=640, height=400))
    page.wait_for_selector("#finding:not([hidden])")
    wait_until_quiet(page)
    selected = page.locator(".word.selected").first
    assert selected.bounding_box()["y"] < 400


@pytest.mark.parametrize(("screen", "count"), [("laptop", 0), ("wide", 29)])
def test_a_large_picture_of_type_has_its_words_at_its_sides(open_view, screen, count):
    page = open_view("type", screen)
    for side in ("rows", "columns"):
        words = page.locator(f".type-{side} span")
        assert sum(one.is_visible() for one in words.all()) == count


@pytest.mark.parametrize(
    ("view", "selectors", "share"),
    [
        ("heads", [".head"], 0.85),
        ("generate", [".generate-page"], 0.85),
        ("text", [".prose-line .word", ".text-links"], 0.85),
        ("steps", [".panel"], 0.6),
        ("steps&step=scores", [".panel"], 0.6),
    ],
)
def test_a_wide_screen_is_used(open_view, view, selectors, share):
    name, _, more = view.partition("&")
    page = open_view(name, "wide", f"&{more}")
    assert page.evaluate(WIDTH, selectors) >= share * SCREENS["wide"][0]


@pytest.mark.parametrize("screen", ["laptop", "wide"])
@pytest.mark.parametrize("heads", [6, 9, 12])
def test_heads_of_a_layer_stand_in_one_row(open_page, serving, heads, screen):
    width, height = SCREENS[screen]
    session = Session(record_layers(*draw_queries_and_keys(2, heads, 11), space_words(PLAIN, 11)))
    page = wait_until_settled(open_page(f"{serving(session)}#view=heads", width=width, height=height))
    tops = page.evaluate(
        """() => [...document.querySelectorAll(".heads-layer")].map((layer) =>
            new Set([...layer.querySelectorAll(".head")].map((one) => one.offsetTop)).size)"""
    )
    assert set(tops) == {1}


@pytest.mark.parametrize("view", VIEWS)
def test_the_controls_of_a_laptop_stand_in_one_line(open_view, view):
    controls = open_view(view, "laptop").locator("#bar > .control, #bar > .choice, #bar > button")
    middles = controls.evaluate_all("(all) => all.map((one) => one.offsetTop + one.offsetHeight / 2)")
    assert max(middles) - min(middles) < 8


@pytest.mark.parametrize("view", VIEWS)
def test_a_phone_has_two_lines_of_tabs_and_tools_and_two_of_controls(open_view, view):
    page = open_view(view, "phone")
    assert page.evaluate(LINES, "#top > .brand, #views a, #tools > *") == 2
    assert page.evaluate(LINES, "#bar > .control, #bar > .choice, #bar > button") <= 2


def test_what_is_shown_is_chosen_from_a_list_on_a_phone(open_view):
    page = open_view("text", "phone")
    page.get_by_role("combobox", name="What is shown of the attention").select_option("carried")
    wait_until(page, "location.hash.includes('show=carried')")


@pytest.mark.parametrize("screen", SCREENS)
def test_no_tab_is_out_of_sight_with_a_list_of_recordings_beside_them(open_view, screen):
    page = open_view("generate", screen)
    assert page.locator("#tools select").is_visible()
    assert page.locator("#views").evaluate("(one) => one.scrollWidth <= one.clientWidth + 1")


def test_the_place_of_a_word_is_not_cut_where_the_word_is_long(open_view):
    page = open_view("generate", "laptop")
    page.evaluate(
        """() => {
            const name = document.querySelector(".generate-name");
            name.querySelector(".generate-word").textContent = "incomprehensibilities";
            const place = Object.assign(document.createElement("small"), {className: "generate-place", textContent: "1,234"});
            name.replaceChildren(name.firstChild, place);
        }"""
    )
    place, number = (
        page.locator(f".generate-cause >> nth=0 >> {one}").bounding_box() for one in (".generate-place", ".numbers")
    )
    assert place["x"] + place["width"] <= number["x"]


@pytest.mark.parametrize("view", ["type", "text", "generate"])
def test_the_outline_of_a_word_hides_no_letter_beside_it(open_view, view):
    page = open_view(view, "laptop")
    if view == "generate":
        page.locator(".generate-came .word").nth(2).click()
    word = page.locator(".word.selected, .word[aria-current='true'], .type-words [aria-pressed='true']").first
    beyond = "(one) => parseFloat(getComputedStyle(one).outlineWidth) + parseFloat(getComputedStyle(one).outlineOffset)"
    assert 0 < word.evaluate(beyond) <= 1


def test_on_a_phone_on_its_side_the_text_begins_at_the_top_and_its_links_stand_beside_it(open_view):
    page = open_view("text", "landscape")
    text, links = (page.locator(one).bounding_box() for one in (".prose-line >> nth=0", ".text-links"))
    assert text["y"] - page.locator(".text-controls").evaluate("(one) => one.getBoundingClientRect().bottom") < 40
    assert links["x"] >= text["x"] + text["width"]
    assert page.locator(".text-links .link").count() > 4
    assert page.locator(".text-links").evaluate("(one) => one.scrollHeight <= one.clientHeight + 1")


@pytest.mark.parametrize(
    ("view", "selector"),
    [
        ("type", ".type-words >> nth=0"),
        ("text", ".prose"),
        ("map", ".map-sheet"),
        ("compare", ".compare-turned .compare-frame"),
        ("generate", ".generate-words"),
    ],
)
def test_at_200_percent_the_picture_has_room_and_can_be_scrolled_into_sight(open_view, view, selector):
    page = open_view(view, "zoomed")
    page.locator(selector).evaluate("(one) => one.scrollIntoView({block: 'center'})")
    box, foot = page.locator(selector).bounding_box(), page.locator("#foot").bounding_box()
    assert min(box["height"], box["width"]) >= 60
    assert box["y"] + min(box["height"], 200) <= min(foot["y"], SCREENS["zoomed"][1]) + 1
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_three_pictures_of_compare_have_their_headings_at_one_height(open_view):
    tops = (
        open_view("compare", "wide")
        .locator(".compare-head h2")
        .evaluate_all("(all) => all.map((one) => one.getBoundingClientRect().top)")
    )
    assert max(tops) - min(tops) < 2


def test_pictures_of_compare_have_words_where_they_fit(open_view):
    page = open_view("compare", "wide")
    assert page.locator(".compare-pane").first.locator(".compare-rows span").count() == 29
    heights = page.locator(".compare-rows span").evaluate_all("(all) => all.map((one) => [one.scrollHeight, one.clientHeight])")
    assert all(text <= room + 1 for text, room in heights)


def test_nothing_on_the_screen_has_more_than_three_digits_of_a_weight_in_compare(open_view):
    page = open_view("compare", "laptop")
    wait_until(page, "document.querySelector('.compare-read').textContent.includes('rank')")
    assert not page.evaluate("/\\d\\.\\d{6}/.test(document.querySelector('.compare-read').textContent)")
    titles = page.locator(".compare-read .note").evaluate_all("(all) => all.map((one) => one.title)")
    assert [len(one) > 8 for one in titles] == [True, True]  # every digit, where the pointer rests


def test_no_other_head_is_shown_before_that_of_the_finding(open_page, address):
    asked = []
    page = wait_until_settled(
        open_page(f"{address}#view=text&r=r1&find=clearest", answered=lambda answer: asked.append(answer.url))
    )
    wait_until(page, "!document.querySelector('#finding').hidden")
    first = next(n for n, url in enumerate(asked) if "/row?" in url)
    assert any("/finding" in url for url in asked[:first])
    assert [one for one in asked if "/row?" in one and "head" in one] == [one for one in asked if "/row?" in one]


def test_an_error_of_steps_stands_without_controls_that_have_nothing_to_control(open_page, address):
    page = wait_until_quiet(open_page(f"{address}#view=steps&r=r1&example=nothing", quiet=False))
    wait_until(page, "document.querySelector('[role=alert], .error')")
    controls = page.locator(".steps-switches, .steps-line, .steps-foot")
    assert controls.evaluate_all("(all) => all.map((one) => one.checkVisibility())") == [False] * 3
