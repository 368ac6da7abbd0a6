"""Where everything stands: nothing is cut, and a screen is used, from a phone to a wide one and at 200 %."""

import itertools

import pytest

import regard
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
    "small phone": (360, 740),
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
BEYOND = """() => [...document.querySelectorAll("p, h1, h2, h3, figcaption, .numbers")]
    .filter((one) => one.checkVisibility() && !one.closest(".type-heads, .chips, .panel") && one.textContent)
    .filter((one) => {
        const range = document.createRange();
        range.selectNodeContents(one);
        return range.getBoundingClientRect().right > innerWidth - 4;
    }).map((one) => one.textContent)"""
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
def test_no_label_is_cut_and_no_sentence_or_number_reaches_beyond_the_screen(open_view, view, screen):
    page = open_view(view, screen)
    assert page.evaluate(CUT) == []
    assert page.evaluate(BEYOND) == []


@pytest.mark.parametrize("name", ["induction", "previous", "sink", "leak", "translation", "long"])
def test_a_finding_takes_at_most_three_lines_of_a_laptop(open_page, address, name):
    page = open_page(f"{address}#view=map&find={name}")
    page.wait_for_selector("#finding:not([hidden])")
    heights = page.locator("#finding").evaluate(
        """(one) => {
            const range = document.createRange();
            range.selectNodeContents(one);
            return [range.getBoundingClientRect().height, parseFloat(getComputedStyle(one).lineHeight)];
        }"""
    )
    assert heights[0] <= 3.2 * heights[1]


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


@pytest.mark.parametrize(("view", "screen"), list(itertools.product(VIEWS, ["phone", "small phone"])))
def test_a_phone_has_two_lines_of_tabs_and_tools_and_two_of_controls(open_view, view, screen):
    page = open_view(view, screen)
    assert page.evaluate(LINES, "#top > .brand, #views a, #tools > *") == 2
    assert page.evaluate(LINES, "#bar > .control, #bar > .choice, #bar > button") <= 2


@pytest.mark.parametrize("screen", SCREENS)
def test_a_recording_with_a_long_name_puts_no_tab_out_of_sight_and_is_named_where_there_is_room(open_view, screen):
    page = open_view("generate", screen)
    name = "pocket, layer 2 without its mask: Lily had a red ball and Tom had a blue ball"
    page.locator("#tools select option:checked").evaluate("(one, name) => (one.textContent = name)", name)
    assert page.locator("#views").evaluate("(one) => one.scrollWidth <= one.clientWidth + 1")
    assert page.locator("#top").evaluate("(one) => one.scrollWidth <= one.clientWidth + 1")
    assert page.locator("#tools select").bounding_box()["width"] > (80 if "phone" in screen else 200)


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


def test_no_other_head_is_shown_before_that_of_the_finding(open_page, address):
    asked = []
    page = wait_until_settled(
        open_page(f"{address}#view=text&r=r1&find=clearest", answered=lambda answer: asked.append(answer.url))
    )
    wait_until(page, "!document.querySelector('#finding').hidden")
    first = next(n for n, url in enumerate(asked) if "/row?" in url)
    assert any("/finding" in url for url in asked[:first])
    assert [one for one in asked if "/row?" in one and "head" in one] == [one for one in asked if "/row?" in one]


CONTROLS = "#bar .name, #bar .choice button, #bar > button, .generate-settings .name, .steps-switches .name"
OF_HEADS = ".heads-controls .name, .heads-controls [data-control=probe], .heads-controls [data-control=sight]"


@pytest.mark.parametrize("view", VIEWS)
def test_the_word_of_every_control_is_explained_by_the_help(open_view, view):
    page = open_view(view, "laptop")
    labels = {one.strip() for one in page.locator(f"{CONTROLS}, {OF_HEADS}").all_inner_texts()} - {"show"}
    page.get_by_role("button", name="Help").click()
    terms = ", ".join(page.locator("dialog .terms dt").all_inner_texts()).split(", ")
    assert labels
    assert labels - set(terms) == set()
    assert all(len(text) > 20 for text in page.locator("dialog .terms dd").all_inner_texts())


@pytest.fixture(scope="module")
def long_word(tmp_path_factory):
    """A page of a text with a token that is wider than a line of most screens."""
    place = tmp_path_factory.mktemp("long") / "page.html"
    words = [*space_words(PLAIN, 8), " " + "supercalifragilistic" * 5, *space_words(PLAIN, 11)]
    regard.page(record_layers(*draw_queries_and_keys(1, 2, len(words)), words), place)
    return place.as_uri()


@pytest.mark.parametrize("screen", SCREENS)
def test_a_token_wider_than_a_line_of_text_ends_in_sight(open_page, long_word, screen):
    width, height = SCREENS[screen]
    page = wait_until_settled(open_page(f"{long_word}#view=text&q=8", width=width, height=height))
    word = page.locator('.prose [data-n="8"]')
    inside = word.evaluate("(one) => [one.getBoundingClientRect().right, one.closest('.prose').getBoundingClientRect().right]")
    assert inside[0] <= inside[1]
    assert word.evaluate("(one) => getComputedStyle(one).textOverflow") == "ellipsis"
    assert word.get_attribute("title").strip() == "supercalifragilistic" * 5


@pytest.mark.parametrize("size", [(1280, 800), (900, 800), (900, 600), (390, 844)])
def test_no_word_of_compare_stands_on_another_and_the_legend_is_in_sight(open_page, long_word, size):
    page = wait_until_settled(open_page(f"{long_word}#view=compare&pane=2", width=size[0], height=size[1]))
    tops = page.locator(".compare-turned .compare-rows span").evaluate_all(
        "(all) => all.filter((one) => one.checkVisibility()).map((one) => one.getBoundingClientRect().top)"
    )
    assert all(lower - upper >= 9.5 for upper, lower in itertools.pairwise(tops))
    if size[1] >= 800:
        assert len(tops) == 20
        legend = page.locator(".compare-turned .legend").bounding_box()
        assert legend["y"] + legend["height"] <= page.locator("#caption").bounding_box()["y"]
