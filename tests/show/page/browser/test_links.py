"""Each view by a link that holds its whole state: what stands there stands there again after reload, back and forward."""

import json

import pytest

from regard.models import GPT2
from regard.show.page.gallery import WORDS
from regard.show.page.model_adapter import adapt_model
from regard.show.page.session import Session
from show.page.browser.page_waits import link, wait_for_timers, wait_until, wait_until_quiet, wait_until_settled
from show.page.browser.recordings import PLAIN, draw_queries_and_keys, record_layers, space_words
from show.page.server_client import fill_in_ids

STATES = {
    "type": "view=type&r=r1&layer=1&head=2&q=3",
    "text": "view=text&r=r1&layer=1&q=6&k=2&heads=0,2&way=to&scale=log",
    "heads": "view=heads&r=r1&layer=1&head=1&by=itself&only=local&scale=log",
    "map": "view=map&r=r2&head=1&q=100&k=90&how=max&scale=linear&x=110&y=130&zoom=5",
    "steps": "view=steps&r=r1&layer=1&head=2&q=5&k=3&step=weights&mask=none&root=off&temperature=2.00",
    "compare": "view=compare&r=r1&layer=1&q=5&k=3&layer2=0&head2=2&pane=0&r2=r1&scale=linear",
    "generate": "view=generate&r=r1&text=Once+upon&heat=0.5",
}
# what stands on the stage, in words and pressed buttons, without what is still arriving
STANDS = """() => JSON.stringify([document.querySelector("#caption").textContent, document.querySelector("#legend").textContent,
    [...document.querySelectorAll("#stage [aria-pressed=true], #bar [aria-pressed=true]")].map((one) => one.textContent),
    [...document.querySelectorAll("#stage :is(select, input, textarea), #bar select")].map((one) => one.value),
    [...document.querySelectorAll("#stage :is(.selected, .linked, .panel-cell, .chosen)")].map((one) => one.textContent)])"""


TEXT = "Lily had a red ball."


@pytest.fixture(scope="module")
def session():
    session = Session(record_layers(*draw_queries_and_keys(2, 3, 13), space_words(PLAIN, 13)), adapt_model(GPT2.load("pocket")))
    session.add_recording(record_layers(*draw_queries_and_keys(1, 2, 300, seed=3), space_words(PLAIN, 300)))
    session.add_recording(
        record_layers(*draw_queries_and_keys(1, 2, 11, seed=4), [*space_words(PLAIN[::-1], 10), "."])
    )  # a period is no word
    return session


@pytest.fixture(scope="module")
def address(serving, session):
    return serving(session)


@pytest.fixture(scope="module")
def states(session):
    """The links of the views, with the ids of the recordings."""
    return {view: fill_in_ids(session, state) for view, state in STATES.items()}


def stands(page) -> str:
    """What stands on the stage, once it no longer changes."""
    wait_until(page, "document.querySelector('#wait').hidden")
    wait_until_quiet(page)
    before = None
    while (now := page.evaluate(STANDS)) != before:
        before = now
        wait_until_quiet(wait_for_timers(page, 250))
    return now


@pytest.mark.parametrize("view", STATES)
def test_a_link_is_kept_as_it_was_given_and_shows_the_same_when_it_is_loaded_again(open_page, address, states, view):
    page = open_page(f"{address}#{states[view]}")
    first = stands(page)
    assert page.evaluate("location.hash").removeprefix("#") == states[view]
    page.reload()
    assert stands(page) == first
    assert page.evaluate("location.hash").removeprefix("#") == states[view]


@pytest.mark.parametrize("view", STATES)
def test_back_and_forward_lead_through_the_views(open_page, address, view):
    page = open_page(f"{address}#{STATES[view]}")
    first = stands(page)
    other = "Text" if view != "text" else "Map"
    page.locator("#views").get_by_role("link", name=other, exact=True).click()
    wait_until(page, f"location.hash.includes('view={other.lower()}')")
    second = stands(page)
    page.go_back()
    assert stands(page) == first
    page.go_forward()
    assert stands(page) == second


WORD = {  # the word that each view shows, without its spaces
    "type": "document.querySelector('.type-words [aria-pressed]')?.textContent.trim()",
    "text": "document.querySelector('.word.selected')?.textContent.trim()",
    "steps": "document.querySelector('.steps-bars select')?.selectedOptions[0].textContent.split(' ')[0].replace(/[‘’]/g, '')",
}


@pytest.mark.parametrize("r", ["r1", "r2", "r3"])
def test_the_word_that_is_shown_first_is_the_same_in_every_view(open_page, address, session, r):
    words = set()
    for view, word in WORD.items():
        page = open_page(fill_in_ids(session, f"{address}#view={view}&r={r}"))
        if view == "steps" and r == "r2":  # a row of a long text
            words.add(wait_until(page, "document.querySelector('.steps-bars h2')?.textContent.match(/‘(.*)’/)?.[1]"))
        else:
            words.add(wait_until(page, word))
    assert len(words) == 1


def test_a_head_that_is_chosen_in_one_view_is_shown_in_the_others(open_page, address, session):
    page = wait_until_settled(open_page(fill_in_ids(session, f"{address}#view=type&r=r1&layer=1&heads=all")))
    page.locator(".type-head").nth(3).click()  # the mean is the first
    for view in ("Text", "Map", "Steps"):
        page.locator("#views").get_by_role("link", name=view, exact=True).click()
        wait_until(page, "document.querySelector('#caption').textContent.startsWith('Layer 1, head 2')")
    page.locator("#views").get_by_role("link", name="Map", exact=True).click()
    wait_until(page, "location.hash.includes('view=map')")
    page.keyboard.press("[")
    for view in ("Text", "Type"):
        page.locator("#views").get_by_role("link", name=view, exact=True).click()
        wait_until(page, "document.querySelector('#caption').textContent.includes('ayer 1, head 1')")
    page.locator(".type-head").first.click()
    page.locator("#views").get_by_role("link", name="Text", exact=True).click()
    wait_until(page, "document.querySelector('#caption').textContent.startsWith('Layer 1, mean of its 3 heads')")


def type_text(page, text: str):
    """The page once it has read a text in Type; its own first text is there before, or it would follow what is typed."""
    wait_until_quiet(page)
    page.get_by_role("textbox", name="Your text").fill(text)
    page.keyboard.press("Enter")
    wait_until(page, f"document.querySelector('.type-words')?.innerText.replaceAll('\\n', '') === {text!r}")
    return wait_until_quiet(page)


def words_of(page) -> str:
    return page.locator(".type-words").first.inner_text().replace("\n", "")


LIT = "document.querySelector('#finding')?.checkVisibility() && document.querySelector('.type-words [aria-pressed]')"


def test_the_start_is_a_finding_whatever_was_typed_before_and_its_link_keeps_it(open_page, serving):
    session = Session(None, adapt_model(GPT2.load("pocket")))
    page = type_text(open_page(serving(session)), TEXT)
    address = page.url.partition("#")[0]
    page.goto("about:blank")
    page.goto(address)
    wait_until(page, LIT)
    finding = session.open_gallery("opening", lambda: None)["finding"]
    said = page.locator("#finding").inner_text()
    assert said == " ".join(finding["sentences"])
    assert link(page)["q"] == str(finding["state"]["q"])
    text = " ".join([WORDS] * 4)
    assert (words_of(page), page.get_by_role("textbox", name="Your text").input_value()) == (text, text)
    page.reload()
    wait_until(page, LIT)
    assert page.locator("#finding").inner_text() == said
    page.get_by_role("link", name="A mask that leaks").click()
    wait_until(
        page, "location.hash.includes('view=map') && document.querySelector('#finding').innerText.includes('mask leaks')"
    )
    page.locator("#views").get_by_role("link", name="Heads", exact=True).click()
    wait_until(page, "!document.querySelector('#finding').checkVisibility()")


def test_visitors_see_their_own_recordings_alone_until_they_clear_them(open_page, serving):
    address = serving(Session(None, adapt_model(GPT2.load("pocket"))))
    first, second = type_text(open_page(address), TEXT), type_text(open_page(address), "Tom had a blue ball.")
    for page, text in ((first, TEXT), (second, "Tom had a blue ball.")):
        page.reload()
        wait_until(page, "document.querySelectorAll('.type-words .word').length > 0")
        names = page.locator("select[aria-label=Recording] option").all_inner_texts()
        assert names == [f"GPT-2: {text}"]
    first.get_by_role("button", name="Clear", exact=True).click()
    wait_until(first, "document.querySelector('#finding').checkVisibility()")
    names = first.locator("select[aria-label=Recording] option").all_inner_texts()
    assert [TEXT in name for name in names] == [False] * len(names)


def test_a_link_to_another_server_of_the_same_model_reads_the_text_again(open_page, serving):
    addresses = [serving(Session(None, adapt_model(GPT2.load("pocket")))) for _ in range(2)]
    state = type_text(open_page(addresses[0]), TEXT).evaluate("location.hash")
    for view in ("text", "map", "steps", "type"):
        page = open_page(addresses[1] + state.replace("view=type", f"view={view}"))
        wait_until_settled(page)
        assert page.locator("select[aria-label=Recording]").input_value() == link(page)["r"] in state
    assert words_of(page) == TEXT


def test_a_link_to_what_is_not_here_says_so_and_shows_nothing_else(open_page, address):
    page = open_page(f"{address}#view=heads&r=nothing-of-this-name")
    wait_until(page, "document.querySelector('.empty')")
    assert "not on this server" in page.locator(".empty").inner_text()
    assert page.locator(".head").count() == 0
    page.get_by_role("link", name="Go to the start page").click()
    assert wait_until_settled(page).locator(".word").count() == 13


def test_a_link_to_a_text_of_another_model_says_so_and_offers_to_read_it_here(open_page, serving):
    address = serving(Session(None, adapt_model(GPT2.load("pocket"))))
    page = open_page(f"{address}#view=text&r=other-lily-0123456789ab&text=Lily+had+a+red+ball.")
    wait_until(page, "document.querySelector('.empty')")
    assert "another model" in page.locator(".empty").inner_text()
    page.get_by_role("link", name="See what this model does with it").click()
    wait_until(page, "document.querySelectorAll('.type-words .word').length > 0")
    assert words_of(page) == TEXT


def test_a_story_survives_a_reload_another_server_and_back(open_page, serving):
    addresses = [serving(Session(None, adapt_model(GPT2.load("pocket")))) for _ in range(2)]
    page = open_page(f"{addresses[0]}#view=generate")
    came = "document.querySelector('.generate-came')?.innerText"
    stories = []
    for seed in ("3", "4"):
        page.get_by_role("textbox", name="Prompt").fill("Once upon a time")
        page.locator("input[name=seed]").fill(seed)
        page.locator("select[name=tokens]").select_option("20")
        page.get_by_role("button", name="Generate").click()
        wait_until(page, "document.querySelector('.generate-after a') && location.hash.includes('words=20')")
        stories.append(page.evaluate(came))
    page.locator(".generate-came .word").nth(5).click()
    state = wait_until_quiet(page).evaluate("location.hash")
    assert link(page)["word"] == "5"
    page.go_back()
    wait_until(page, f"{came} === {json.dumps(stories[0])}")
    page.go_forward()
    wait_until(page, f"{came} === {json.dumps(stories[1])}")
    page.reload()
    for shown in (page, open_page(addresses[1] + state)):
        wait_until(
            shown, f"{came} === {json.dumps(stories[1])} && document.querySelector('.generate-came [aria-current=true]')"
        )
        assert shown.locator(".generate-came [aria-current=true]").get_attribute("data-n") == "5"
        assert shown.get_by_role("textbox", name="Prompt").input_value() == "Once upon a time"
        assert shown.locator("input[name=seed]").input_value() == "4"
