"""For who sees little, hears the page, or has no mouse: contrasts on both grounds, names for controls, a focus that shows."""

import itertools

import numpy as np
import pytest
from axe_playwright_python.sync_playwright import Axe

from regard.models import GPT2
from regard.show.page.model_adapter import adapt_model
from regard.show.page.session import Session
from regard.show.page.single_file import page as write
from show.page.browser.page_waits import wait_until, wait_until_quiet, wait_until_settled
from show.vision_models import llava, swin, vit

VIEWS = ("type", "text", "heads", "map", "steps", "compare", "generate")
GROUNDS = (False, True)
TEXT = "Lily had a red ball. Tom had a blue ball. Lily gave her red ball to Tom."
NAMED = {"button", "link", "combobox", "textbox", "searchbox", "slider", "spinbutton", "checkbox", "menuitem", "application"}
NAMED |= {"image", "img", "dialog", "progressbar", "Canvas", "navigation", "complementary", "DisclosureTriangle"}
# the ratio of a text to the ground behind it, whatever it is laid over
TEXTS = """() => {
    const mixed = (front, [r, g, b]) => front.slice(0, 3).map((part, n) => part * front[3] + [r, g, b][n] * (1 - front[3]));
    const parts = (colour) => [...colour.match(/[\\d.]+/g).map(Number), 1].slice(0, 4);
    const lit = (part) => (part <= 10.31 ? part / 3294.6 : ((part / 255 + 0.055) / 1.055) ** 2.4);
    const luminance = ([r, g, b]) => 0.2126 * lit(r) + 0.7152 * lit(g) + 0.0722 * lit(b);
    const ground = (one) => {
        const own = parts(getComputedStyle(one).backgroundColor);
        return own[3] === 1 || one === document.documentElement ? own : mixed(own, ground(one.parentElement));
    };
    const said = (one) => [...one.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    const read = (one) => (said(one) || one.matches("textarea, input, select")) &&
        one.checkVisibility({visibilityProperty: true}) && !one.closest(":disabled, option, .mark-end");
    return [...document.querySelectorAll("body *")].filter(read).map((one) => {
        const look = getComputedStyle(one);
        const behind = ground(one);
        const front = mixed(parts(look.color), behind);
        const [low, high] = [luminance(front), luminance(behind)].sort((a, b) => a - b);
        const large = parseFloat(look.fontSize) >= 24 || (parseFloat(look.fontSize) >= 18.66 && look.fontWeight >= 700);
        const ratio = (high + 0.05) / (low + 0.05);
        return {ratio, least: large ? 3 : 4.5, text: one.textContent.slice(0, 30), of: one.className};
    });
}"""
SHADES = """async () => {
    const {computeContrast, chooseInk, shadeWeight} = await import("./static/drawing/color.js");
    const drawn = {"#000": [0, 0, 0], "#fff": [255, 255, 255]};
    const shades = Array.from({length: 257}, (_, n) => shadeWeight(n / 256));
    return shades.map((color) => computeContrast(drawn[chooseInk(color)], color));
}"""
PAPERS = """async () => {
    const {computeContrast} = await import("./static/drawing/color.js");
    const sample = document.body.appendChild(document.createElement("i"));
    const bytes = (name) => {
        sample.style.color = `var(--${name})`;
        return getComputedStyle(sample).color.match(/\\d+/g).map(Number);
    };
    const pair = (name, behind) => [`${name} on ${behind}`, computeContrast(bytes(name), bytes(behind))];
    const names = ["ink", "faint", "accent", "edge", "strong"];
    return Object.fromEntries(names.flatMap((name) => ["paper", "raised", "hidden"].map((behind) => pair(name, behind))));
}"""


@pytest.fixture(scope="module")
def address(serving):
    session = Session(None, adapt_model(GPT2.load("pocket")))
    session.run_text(TEXT, lambda: None)
    session.run_text("One text more.", lambda: None)
    return serving(session)


@pytest.fixture
def open_view(open_page, address):
    """open_view(view, dark=) is the page with the view drawn, Generate with what it wrote."""

    def page_of(view: str, **look):
        page = open_page(f"{address}#view={view}&r=r1&layer=3&head=1&q=18&k=3&sight=earlier", **look)
        if view != "generate":
            return wait_until_settled(page)
        page.get_by_role("textbox", name="Prompt").fill("Once upon a time")
        page.locator("select[name=tokens]").select_option("5")
        page.get_by_role("button", name="Generate").click()
        page.wait_for_selector(".generate-after a")
        return wait_until_quiet(page)

    return page_of


def list_violations(page) -> list[tuple[str, list[str]]]:
    """What axe finds wrong, with the beginning of each place."""
    found = Axe().run(page).response["violations"]
    return [(one["id"], [node["html"][:120] for node in one["nodes"]]) for one in found]


@pytest.mark.parametrize(("view", "dark"), list(itertools.product(VIEWS, GROUNDS)))
def test_every_text_can_be_read_on_what_lies_behind_it_and_axe_finds_nothing(open_view, view, dark):
    page = open_view(view, dark=dark)
    assert list_violations(page) == []
    texts = page.evaluate(TEXTS)
    assert len(texts) > 20
    assert [one for one in texts if one["ratio"] < one["least"]] == []  # WCAG 2, AA


@pytest.mark.parametrize("dark", GROUNDS)
@pytest.mark.parametrize("way", ["weights", "rollout"])
@pytest.mark.parametrize("make", [vit, swin, llava])
def test_the_image_view_can_be_read_and_axe_finds_nothing(open_page, tmp_path, make, way, dark):
    path = tmp_path / "image.html"
    write(make()[0], path, image=np.full((30, 42, 3), 90, np.uint8))
    page = wait_until_settled(open_page(f"{path.as_uri()}#view=image&way={way}&q=3", dark=dark))
    assert list_violations(page) == []
    assert [one for one in page.evaluate(TEXTS) if one["ratio"] < one["least"]] == []


@pytest.mark.parametrize("dark", GROUNDS)
def test_a_letter_can_be_read_on_every_colour_of_attention(open_page, address, dark):
    assert min(open_page(address, dark=dark).evaluate(SHADES)) >= 4.5


@pytest.mark.parametrize("dark", GROUNDS)
def test_what_is_drawn_can_be_read_and_edges_of_controls_be_seen(open_page, address, dark):
    ratios = open_page(address, dark=dark).evaluate(PAPERS)
    poor = {
        name: ratio for name, ratio in ratios.items() if ratio < (4.5 if name.startswith(("ink", "faint", "accent")) else 3)
    }
    assert poor == {}


@pytest.mark.parametrize("view", VIEWS)
def test_a_screen_reader_has_a_name_for_everything_that_can_be_used_or_looked_at(open_view, view):
    page = open_view(view)
    nodes = page.context.new_cdp_session(page).send("Accessibility.getFullAXTree")["nodes"]
    seen = [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes if not node["ignored"]]
    roles = {role for role, _ in seen}
    assert {"main", "navigation", "heading", "button", "link"} <= roles
    assert [role for role, name in seen if role in NAMED and not name.strip()] == []


@pytest.mark.parametrize("view", VIEWS)
def test_all_that_a_mouse_can_press_is_reached_by_tab_and_the_focus_shows(open_view, view):
    page = open_view(view)
    wanted = page.evaluate(
        """() => [...document.querySelectorAll("button:enabled, a[href], select, input, textarea, summary")]
            .filter((one) => one.checkVisibility() && one.tabIndex >= 0).length"""
    )
    reached, faint = set(), []
    for _ in range(wanted + 20):  # once round, from wherever the focus is
        page.keyboard.press("Tab")
        place, outline, width, told = page.evaluate(
            """() => {
                const one = document.activeElement;
                const {outlineStyle, outlineWidth} = getComputedStyle(one);
                const place = [...document.querySelectorAll("*")].indexOf(one);
                const told = one.outerHTML.slice(0, 100);
                return [one === document.body ? null : place, outlineStyle, parseFloat(outlineWidth), told];
            }"""
        )
        reached |= {place} - {None}
        if place is not None and (outline == "none" or width < 2):
            faint.append(told)
    assert faint == []
    assert len(reached) >= wanted


def test_each_group_of_choices_says_what_is_chosen(open_view):
    page = open_view("map")
    page.get_by_role("group", name="Color scale").get_by_role("button", name="log").click()
    wait_until(page, "location.hash.includes('scale=log')")
    nodes = page.context.new_cdp_session(page).send("Accessibility.getFullAXTree")["nodes"]
    pressed = {
        node["name"]["value"]
        for node in nodes
        for one in node.get("properties", [])
        if one["name"] == "pressed" and one["value"]["value"] == "true"
    }
    assert pressed == {"weight", "log"}
