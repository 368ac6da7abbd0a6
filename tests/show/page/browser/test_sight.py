"""Who may see whom: a panel of Heads that asks the model when it is opened, and shows what was expected and found."""

import re

from regard.models import GPT2
from regard.models.gpt2_adapter import GPT2Adapter
from regard.show.page.session import Session
from show.page.browser.page_waits import link, wait_until, wait_until_quiet, wait_until_settled
from show.page.leaky_models import LAYER, TEXT, make_leaky_model
from show.page.server_client import make_sorter

COUNT = 12  # words of the text that are asked for
BUTTON = "Who may see whom?"
SIGNS = """() => {
    const sign = (cell) => (cell.matches(".sight-sees") ? "■" : cell.textContent);
    const of = (cell) => [Number(cell.dataset.i), Number(cell.dataset.j), sign(cell)];
    return [...document.querySelectorAll(".sight-square")].map((square) => [...square.querySelectorAll("td[data-i]")].map(of));
}"""
WIDE = "[...document.querySelectorAll('.sight *')].filter((one) => one.getBoundingClientRect().right > innerWidth).length"


def session(adapter, *texts: str) -> Session:
    found = Session(None, adapter)
    for text in texts:
        found.run_text(text, lambda: None)
    return found


def wait_for_answer(page, said: str):
    """The page once its panel says something that begins so."""
    wait_until(page, f"document.querySelector('.sight-said')?.textContent.startsWith({said!r})")
    return wait_until_quiet(page)


def signs(page) -> list[dict[tuple[int, int], str]]:
    """What stands in each square, by pair: a sign, or "■" where a word sees and may."""
    rows = page.evaluate(SIGNS)
    return [{(i, j): sign for i, j, sign in square if sign} for square in rows]


def read(page) -> str:
    return page.locator(".sight-read").inner_text()


def test_a_layer_that_leaks_is_seen_in_the_squares_said_in_words_and_read_pair_by_pair(open_page, serving):
    asked = []
    page = wait_until_settled(
        open_page(f"{serving(session(make_leaky_model(), TEXT))}#view=heads", answered=lambda answer: asked.append(answer.url))
    )
    assert not any("examination" in url for url in asked)
    page.get_by_role("button", name=BUTTON).click()
    wait_for_answer(page, "leaking: of these 12 tokens, 11 see what they may not.")
    lower = {(i, j): "■" for i in range(COUNT) for j in range(i + 1)}
    upper = {(i, j): "+" for i in range(COUNT) for j in range(i + 1, COUNT)}
    assert signs(page) == [lower, lower | upper, upper]
    told = page.locator(".sight-lines").inner_text()
    assert "future leak" in told
    assert re.search(rf"blocks\.{LAYER}\.attention: row 0 puts 0\.\d+ on token \d+, which comes later", told)
    assert "masked_fill(~mask, -torch.inf)" in told
    assert "may not, but does" in page.locator(".sight-key").inner_text()
    assert read(page).startswith(
        "‘Lily’ (token 0) may not see ‘had’ (token 1), which comes later: it does. Changing ‘had’ changes"
    )

    page.locator(".sight-square").nth(1).locator("td[data-i='4'][data-j='9']").hover()
    assert read(page).startswith("‘ball’ (token 4) may not see ‘blue’ (token 9), which comes later: it does.")
    page.locator(".sight-square").first.locator("td[data-i='9'][data-j='4']").click()
    assert (link(page)["q"], link(page)["k"], link(page)["sight"]) == ("9", "4", "earlier")
    page.locator(".sight-squares").focus()
    for key in ("ArrowUp", "ArrowUp", "ArrowRight"):
        page.keyboard.press(key)
    assert (link(page)["q"], link(page)["k"]) == ("7", "5")
    assert not {"layer", "head"} & set(link(page))  # the pictures below stay where they were
    assert page.locator(".sight-at").count() == 3
    page.mouse.move(5, 5)
    page.reload()
    wait_for_answer(page, "leaking: of these 12 tokens")
    assert read(page).startswith("‘had’ (token 7) may see ‘.’ (token 5), which came before: it does.")
    assert len([url for url in asked if "examination" in url]) == 2  # once for each time it was opened
    assert page.evaluate(WIDE) == 0
    page.set_viewport_size({"width": 390, "height": 844})
    assert wait_until_quiet(page).evaluate(WIDE) == 0


def test_of_a_right_model_nothing_differs_until_more_is_expected(open_page, serving):
    page = open_page(f"{serving(session(GPT2Adapter('pocket', GPT2.load('pocket')), TEXT))}#view=heads&sight=earlier")
    wait_for_answer(page, "pocket: of these 12 tokens, none sees a later one.")
    expected, found, difference = signs(page)
    assert (expected == found, difference) == (True, {})
    assert "checked" in page.locator(".sight-lines").inner_text()
    page.locator(".sight-square").last.locator("td[data-i='4'][data-j='9']").hover()
    assert read(page) == "‘ball’ (token 4) may not see ‘blue’ (token 9), which comes later: it does not."
    page.get_by_role("button", name="every token").click()
    wait_for_answer(page, "pocket: the result is not as expected.")
    assert signs(page)[2] == {(i, j): "−" for i in range(COUNT) for j in range(i + 1, COUNT)}
    assert "wrong mask" in page.locator(".sight-lines").inner_text()
    page.get_by_role("button", name=BUTTON).click()
    assert page.locator(".sight").is_hidden()


def test_an_error_is_said_in_the_panel_in_place_of_the_squares(open_page, serving):
    running = session(make_sorter(), "CBABBC", "AABB")
    page = open_page(f"{serving(running)}#view=heads&r=r1&sight=earlier", quiet=False)
    wait_for_answer(page, "sorter: of these 6 tokens, none sees a later one.")
    second = running.listed[1]
    running.remove_recording(second)
    page.locator("select[aria-label=Recording]").select_option(second)
    wait_for_answer(page, "there is no recording")
    assert page.locator(".sight-said").get_attribute("class") == "sight-said error"
    assert page.locator(".sight-square").count() == 0
