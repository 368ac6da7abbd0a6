"""The Type view: words of one's own, what each looked at, and what comes next, by mouse and by keyboard."""

import math
import re
import time

import pytest
import torch

import regard
from regard.models import GPT2
from regard.show.page.model_adapter import adapt_model
from regard.show.page.session import Session
from show.page.browser.page_waits import PATIENCE, wait_until, wait_until_quiet
from show.page.browser.recordings import CODE, expect_digits

TEXT = "CBABBC"
PERCENT = 5.01e-4  # half a unit of the last digit of 12.3 %


@pytest.fixture(scope="module")
def model():
    return GPT2.load("sorter", torch.float64)


@pytest.fixture
def address(serving, model):
    return serving(Session(None, adapt_model(model)))


@pytest.fixture(scope="module")
def right(model):
    """The recording of the text, and the probabilities of what comes next."""
    ids = torch.tensor([adapt_model(model).encode(TEXT)])
    with regard.record(model) as recording, torch.no_grad():
        logits = model(ids)
    return recording, logits[0, -1].softmax(-1)


def type_text(page, text: str):
    """The page once it has run the model on a text."""
    page.get_by_role("textbox", name="Your text").fill(text)
    page.keyboard.press("Enter")
    return wait_for_words(page, len(text))


def wait_for_words(page, count: int):
    wait_until(page, f"document.querySelectorAll('.type-words .word').length === {count}")
    wait_until_quiet(page)
    return page


def test_the_words_of_a_recording_that_was_given_stand_in_the_text_field_and_can_be_run(open_page, serving, model, right):
    recording, _ = right
    recording.tokens = list(TEXT)
    page = open_page(f"{serving(Session(recording, adapt_model(model)))}#view=type")
    wait_for_words(page, len(TEXT))
    box = page.get_by_role("textbox", name="Your text")
    assert box.input_value() == TEXT
    page.locator("[data-control='show pull']").click(force=True)
    assert "press Run in Type" in page.locator("[role=alert]").inner_text()
    box.press("Enter")
    wait_until(page, "location.hash.includes('text=')")
    assert wait_for_words(page, len(TEXT)).locator(".type-next li").count() > 0


def weights(page) -> list[float]:
    """The weight that the title of each word tells, NaN where it is not visible."""
    titles = [word.get_attribute("title") or "" for word in page.locator(".type-words .word").all()]
    return [float(title.removeprefix("weight ")) if title.startswith("weight") else math.nan for title in titles]


def mean(recording, layer: int, q: int) -> list[float]:
    row = recording.map(layer)[0, :, q].mean(0).tolist()
    return [weight if k <= q else math.nan for k, weight in enumerate(row)]


def shows(page, expected: list[float]) -> None:
    """Waits until the words have these weights; three digits of them are told."""
    right = [expect_digits(weight, CODE * weight) for weight in expected]
    end = time.monotonic() + PATIENCE
    while weights(page) != right and time.monotonic() < end:
        page.wait_for_timeout(20)
    assert weights(page) == right


def layer_of(page) -> int:
    return read_link(page, "layer")


def read_link(page, name: str) -> int:
    """A number in the link, 0 where it is left out."""
    found = re.search(rf"\b{name}=(\d+)", page.evaluate("location.hash"))
    return int(found[1]) if found else 0


def read_shares(page) -> list[float]:
    """The probabilities of what comes next."""
    shown = page.locator(".type-expected .numbers").all_inner_texts()
    return [0.0 if text.startswith("<") else float(text.removesuffix(" %")) / 100 for text in shown]


def row_of(page, recording, q: int) -> list[float]:
    """The row of the head that the page shows."""
    row = recording.map(layer_of(page))[0, read_link(page, "head"), q].tolist()
    return [weight if k <= q else math.nan for k, weight in enumerate(row)]


def test_enter_shows_what_the_last_word_looked_at_in_the_head_of_the_finding(open_page, address, right):
    page = type_text(open_page(address), TEXT)
    assert "".join(page.locator(".type-words .word").all_inner_texts()) == TEXT
    shows(page, row_of(page, right[0], 5))
    assert f"head {read_link(page, 'head')} of layer {layer_of(page)}" in page.locator("#finding").inner_text().lower()


def test_a_picked_word_shows_what_it_looked_at_and_what_comes_next_after_it(open_page, address, right, model):
    page = type_text(open_page(address), TEXT)
    page.locator(".type-words .word").nth(3).click()
    shows(page, row_of(page, right[0], 3))
    page.keyboard.press("ArrowLeft")
    shows(page, row_of(page, right[0], 2))
    assert "q=2" in page.evaluate("location.hash")
    wait_until(page, "document.querySelector('.type-predicted h2').innerText === 'What comes next after ‘A’'")
    wait_until_quiet(page)
    with torch.no_grad():
        best = model(torch.tensor([adapt_model(model).encode(TEXT)]))[0, 2].softmax(-1).sort(descending=True).values.tolist()
    shown = read_shares(page)
    assert shown == pytest.approx(best[: len(shown)], abs=PERCENT)


def test_a_head_is_chosen_by_its_small_picture_or_by_a_key(open_page, address, right):
    page = type_text(open_page(address), TEXT)
    page.get_by_role("button", name="head 1", exact=True).click()
    wait_until_quiet(page)
    row = right[0].map(layer_of(page))[0, 1, 5].tolist()
    shows(page, row)
    page.locator(".type-words .word").nth(5).focus()
    page.keyboard.press("[")
    shows(page, right[0].map(layer_of(page))[0, 0, 5].tolist())
    page.keyboard.press("[")
    shows(page, mean(right[0], layer_of(page), 5))


def test_the_probabilities_of_the_next_word_are_the_models(open_page, address, right):
    page = type_text(open_page(address), TEXT)
    best, found = right[1].sort(descending=True).values.tolist(), read_shares(page)
    assert found == pytest.approx(best[: len(found)], abs=PERCENT)


def test_a_next_word_that_is_picked_is_added_and_run(open_page, address):
    page = type_text(open_page(address), TEXT)
    word = page.locator(".type-word").first.inner_text()
    page.locator(".type-expected").first.click()
    wait_for_words(page, len(TEXT) + 1)
    assert page.get_by_role("textbox", name="Your text").input_value() == TEXT + word


def test_an_empty_box_offers_sentences_that_run_when_picked(open_page, address):
    page = open_page(address)
    offers = page.locator(".type-offers .chip:not([data-translation])")
    offers.first.wait_for()
    assert offers.count() == 3
    first = offers.first.inner_text()
    offers.first.click()
    wait_for_words(page, len(first))
    assert not page.locator(".type-offers").is_visible()
    page.get_by_role("textbox", name="Your text").fill("")
    assert page.locator(".type-offers").is_visible()


def test_nothing_typed_and_what_cannot_be_read_are_told_beside_the_box(open_page, address):
    page = open_page(address, quiet=False)  # the browser itself reports the refused request
    page.get_by_role("textbox", name="Your text").press("Enter")
    assert page.locator(".type-form + .error").inner_text() == "Type a text first."
    page.get_by_role("textbox", name="Your text").fill("hello")
    page.keyboard.press("Enter")
    wait_until(page, "document.querySelector('.type-form + .error')?.textContent.includes('A')")
    type_text(page, TEXT)
    assert page.locator(".error").count() == 0


def test_the_links_lead_to_the_same_words_and_the_same_word(open_page, address):
    page = type_text(open_page(address), TEXT)
    page.locator(".type-words .word").nth(2).click()
    wait_until(page, "document.querySelector('.type-links a').href.includes('q=2')")
    for name in ("text", "heads", "map", "steps"):
        href = page.locator(".type-links a").nth(["text", "heads", "map", "steps"].index(name)).get_attribute("href")
        assert f"view={name}" in href
        assert "r=gpt-2-cbabbc-" in href
        assert "q=2" in href
    page.get_by_role("navigation", name="The same tokens").get_by_role("link", name="Steps").click()
    page.wait_for_selector(".steps-formula b")
    assert page.get_by_role("combobox", name="Query").input_value() == "2"


def test_on_a_phone_the_page_itself_never_scrolls_sideways(open_page, address):
    page = type_text(open_page(address, width=390, height=844), TEXT)
    assert page.evaluate("document.querySelector('#stage').scrollWidth <= innerWidth")


def test_the_page_opens_on_a_head_and_one_click_shows_what_is_lost_without_it(open_page, serving):
    session = Session(adapter=adapt_model(GPT2.load("pocket")))
    found = session.open_first_finding(lambda: None)["finding"]
    page = open_page(serving(session))
    wait_until(page, "!document.querySelector('#finding').hidden && document.querySelectorAll('.type-expected').length")
    assert page.locator("#finding").inner_text() == " ".join(found["sentences"])
    head = f"{found['state']['layer']}.{found['state']['head']}"
    page.get_by_role("button", name=f"Switch head {head} off").click()
    page.locator(".type-compared").first.wait_for()
    before, after = (
        float(one.removesuffix(" %")) for one in page.locator(".type-compared .numbers").first.inner_text().split(" → ")
    )
    assert (before, after) == (pytest.approx(81.8, abs=0.1), pytest.approx(0.16, abs=0.01))
    lost = page.locator(".type-predicted .note").inner_text()
    assert lost.startswith(
        f"Without head {head} ‘ball’ falls from {before:.1f} % to {after:.2f} %, and the end of the text comes first."
    )
