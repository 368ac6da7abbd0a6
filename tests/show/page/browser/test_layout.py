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
def test_no_label_is_cut_and_no_sentence_or_number_reaches_beyond_the_screen(open_view, view, screen):
    page = open_view(view, screen)
    assert page.evaluate(CUT) == []
    assert page.evaluate(BEYOND) == []


def test_a_note_above_many_heads_of_type_is_as_wide_as_a_phone(open_view):
    page = open_view("type", "phone")
    page.locator(".type-heads").evaluate("(one) => { for (let n = 0; n < 9; n++) one.append(one.firstChild.cloneNode(true)); }")
    assert page.locator(".type-side .note").first.evaluate("(one) => one.getBoundingClientRect().right <= innerWidth")


def test_a_small_number_beside_a_bar_of_steps_is_no_wider_than_its_column(open_view):
    page = open_view("steps", "wide")
    number = page.locator(".steps-bar .numbers").first
    number.evaluate("(one) => (one.textContent = '8.88e−10')")
    assert number.evaluate("(one) => one.scrollWidth <= one.clientWidth + 1")


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


def test_at_200_percent_a_text_below_its_finding_shows_six_lines(open_page, serving):
    address = serving(Session(record_layers(*draw_queries_and_keys(1, 2, 131), space_words(PLAIN, 131))))
    page = wait_until_settled(open_page(f"{address}#view=text&r=r1&find=clearest", width=640, height=400))
    page.wait_for_selector("#finding:not([hidden])")
    end = page.locator(".prose").evaluate("(one) => one.getBoundingClientRect().bottom + 1")
    ends = page.locator(".prose-line").evaluate_all("(all) => all.map((one) => one.getBoundingClientRect().bottom)")
    assert sum(one <= end for one in ends) >= 6


@pytest.mark.parametrize(("view", "screen"), list(itertools.product(["text", "heads", "map", "compare"], SCREENS)))
def test_the_choice_of_a_logit_is_not_cut_and_numbers_of_a_signed_legend_keep_apart(open_view, view, screen):
    page = open_view(view, screen, "&show=pull")
    wait_until(page, "document.querySelector('[aria-label=\"Next token\"]').value !== '…'")
    assert page.evaluate(CUT) == []
    assert page.locator(".ticks").count() > 0
    assert page.evaluate(CROWDED) == []


@pytest.mark.parametrize("setting", ["pull", "cut"])
@pytest.mark.parametrize("view", ["text", "heads", "map", "steps", "compare"])
def test_the_controls_of_a_phone_take_two_lines_at_most_with_the_choice_of_a_logit(open_view, view, setting):
    page = open_view(view, "phone", f"&show={setting}")
    wait_until(page, "document.querySelector('[aria-label=\"Next token\"]').value !== '…'")
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


@pytest.mark.parametrize(("view", "screen"), list(itertools.product(VIEWS, ["phone", "small phone"])))
def test_a_phone_has_two_lines_of_tabs_and_tools_and_two_of_controls(open_view, view, screen):
    page = open_view(view, screen)
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


@pytest.mark.parametrize("screen", SCREENS)
def test_a_recording_with_a_long_name_puts_no_tab_out_of_sight_and_is_named_where_there_is_room(open_view, screen):
    page = open_view("generate", screen)
    name = "pocket, layer 2 without its mask: Lily had a red ball and Tom had a blue ball"
    page.locator("#tools select option:checked").evaluate("(one, name) => (one.textContent = name)", name)
    assert page.locator("#views").evaluate("(one) => one.scrollWidth <= one.clientWidth + 1")
    assert page.locator("#top").evaluate("(one) => one.scrollWidth <= one.clientWidth + 1")
    assert page.locator("#tools select").bounding_box()["width"] > (80 if "phone" in screen else 200)


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


@pytest.mark.parametrize("screen", SCREENS)
@pytest.mark.parametrize("pane", [0, 2])
@pytest.mark.parametrize("setting", ["weight", "pull"])
def test_the_colors_of_compare_are_explained_within_the_width_of_their_picture(open_view, screen, pane, setting):
    page = open_view("compare", screen, f"&pane={pane}&show={setting}")
    shown = page.locator(".compare-pane").nth(pane)
    plot, legend = (shown.locator(one).bounding_box() for one in (".compare-plot", ".legend"))
    assert abs(legend["x"] - plot["x"]) <= 1
    assert legend["x"] + legend["width"] <= plot["x"] + plot["width"] + 1
    assert shown.locator(".ramp").bounding_box()["width"] > 90  # enough for its numbers
    assert page.evaluate(CUT) == []
    assert page.evaluate(CROWDED) == []


@pytest.mark.parametrize("has_model", [False, True])
def test_the_map_of_a_long_text_has_one_line_of_controls_on_a_laptop(open_page, serving, has_model):
    q, k = draw_queries_and_keys(2, 2, 307)
    recording = record_layers(q, k, space_words(PLAIN, 307))
    adapter = GPT2Adapter("pocket", GPT2.load("pocket")) if has_model else None
    page = wait_until_settled(open_page(f"{serving(Session(recording, adapter))}#view=map&r=r1"))
    assert page.get_by_role("button", name="max", exact=True).is_visible()
    assert page.evaluate(LINES, "#bar > *") == 1
    assert page.locator("#bar").bounding_box()["height"] < 62  # two lines of the question
    assert page.evaluate(CUT) == []


def test_the_predicted_words_of_the_opening_are_in_sight_on_a_laptop(open_page, address):
    page = open_page(f"{address}#view=type&find=induction")
    page.wait_for_selector("#finding:not([hidden])")
    wait_until_quiet(page)
    foot = page.locator("#foot").bounding_box()["y"]
    seen = [
        page.locator(one).first.bounding_box() for one in (".type-predicted h2", ".type-switches", ".type-expected >> nth=1")
    ]
    assert max(one["y"] + one["height"] for one in seen) <= foot
    assert page.locator(".type-told").bounding_box()["width"] > 350  # the sentence beside them has room


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


TOKENS = "A token is what the model reads at a time: a word, a piece of one, or a character."


@pytest.mark.parametrize("view", VIEWS)
def test_the_help_of_every_view_says_that_its_words_are_tokens(open_view, view):
    page = open_view(view, "laptop")
    page.get_by_role("button", name="Help").click()
    assert page.locator("dialog .explained").inner_text().endswith(f" {TOKENS}")


@pytest.mark.parametrize("view", [view for view in VIEWS if view != "heads"])
def test_the_mark_of_a_space_is_explained_where_it_stands_and_by_the_help(open_view, view):
    page = open_view(view, "laptop")
    marks = page.locator(".mark-space")
    if marks.count():
        assert set(marks.evaluate_all("(all) => all.map((one) => one.title)")) == {"a space"}
    page.get_by_role("button", name="Help").click()
    assert "A thin line is a space" in " ".join(page.locator("dialog .terms dd").all_inner_texts())


def test_what_the_buttons_of_heads_and_the_settings_of_generate_do_stands_beside_them(open_view):
    assert "what heads do on any text" in open_view("heads", "laptop").locator(".heads-controls .note").inner_text()
    for screen in ("laptop", "phone"):
        assert (
            "always takes the likeliest token" in open_view("generate", screen).locator(".generate-settings .note").inner_text()
        )


def test_an_error_of_steps_stands_without_controls_that_have_nothing_to_control(open_page, address):
    page = wait_until_quiet(open_page(f"{address}#view=steps&r=r1&example=nothing", quiet=False))
    wait_until(page, "document.querySelector('[role=alert], .error')")
    controls = page.locator(".steps-switches, .steps-line, .steps-foot")
    assert controls.evaluate_all("(all) => all.map((one) => one.checkVisibility())") == [False] * 3


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
