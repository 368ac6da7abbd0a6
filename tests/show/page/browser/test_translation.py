"""A translation on the page: what is typed is translated, and its cross attention is seen in every view."""

import re

import pytest
import torch

from regard.generate.translation_search import END_LABEL
from regard.models import GPT2
from regard.show.page.model_adapter import adapt_model
from regard.show.page.session import Session
from regard.show.page.translator_adapter import SENTENCE, adapt_translator, record_example, record_translation
from regard.weights.translator_weights import INCLUDED_TRANSLATORS
from show.page.browser.page_waits import wait_until, wait_until_quiet
from show.page.browser.recordings import CODE, expect_digits
from show.page.translators import READ, WRITTEN, train_small_translator

ROWS, COLUMNS = "translation", "source"
MIDDLE = 1  # of the transformer's three layers
PLACES = 5.01e-4  # half a unit of the last of three places


@pytest.fixture(scope="module", params=["additive", "transformer"])
def kind(request):
    return request.param


@pytest.fixture
def address(serving, kind):
    return serving(Session(None, adapt_model(train_small_translator(kind))))


@pytest.fixture(scope="module")
def right(kind):
    return record_translation(adapt_translator("translator", train_small_translator(kind)), READ, 2048)


@pytest.fixture
def translator_package(tmp_path, monkeypatch):
    train_small_translator("transformer").save(tmp_path / "translator")
    monkeypatch.setitem(INCLUDED_TRANSLATORS, "translator", tmp_path / "translator")


def type_text(page, text: str = READ):
    wait_until_quiet(page)
    page.get_by_role("textbox", name="Your text").fill(text)
    page.keyboard.press("Enter")
    wait_until(
        page, "document.querySelectorAll('.type-words').length === 2 && document.querySelector('.type-told').textContent !== ''"
    )
    wait_until_quiet(page)
    return page


def layer(kind: str) -> int:
    return MIDDLE if kind == "transformer" else 0


def words(page, n: int) -> list[str]:
    return page.locator(".type-words").nth(n).locator(".word").all_inner_texts()


def pane(page, title: str):
    return page.locator(".text-pane", has=page.get_by_role("heading", name=title))


def darkness(page, title: str) -> list[float]:
    """How far from the lightest colour each word of a pane is shaded."""
    seen = [one.evaluate("e => getComputedStyle(e).backgroundColor") for one in pane(page, title).locator(".word").all()]
    return [765 - sum(map(int, re.findall(r"\d+", one)[:3])) if "0, 0, 0, 0" not in one else -1 for one in seen]


def test_what_is_typed_is_translated_and_a_word_of_it_shades_the_sentence(open_page, address, right, kind):
    page = type_text(open_page(address))
    assert "".join(words(page, 0)) == READ + END_LABEL
    assert "".join(words(page, 1)) == WRITTEN + END_LABEL
    row = right.tokens.rows.index(" cheval")
    assert page.locator(".type-words [aria-pressed]").inner_text() == " cheval"  # the last that says something
    for q in (row, 1):
        page.locator(".type-words").nth(1).locator(".word").nth(q).click()
        wait_until_quiet(page)
        mean = right.map(layer(kind), kind="cross")[0, :, q].mean(0)
        wait_until(
            page, f"document.querySelector('.type-told').textContent.startsWith('To write ‘{right.tokens.rows[q].strip()}’')"
        )
        wait_until_quiet(page)
        told = [
            one.get_attribute("title").removeprefix("weight ")
            for one in page.locator(".type-words").first.locator(".word").all()
        ]
        assert [float(one) for one in told] == [expect_digits(weight, CODE * weight) for weight in mean.tolist()]
        best = right.tokens.columns[int(mean.argmax())].strip()
        assert f"the model attended most to ‘{best}’" in page.locator(".type-told").inner_text()


def test_in_text_a_written_word_shades_those_that_were_read_and_the_other_way(open_page, address, right, kind):
    page = type_text(open_page(address))
    page.get_by_role("link", name="Read in Text").click()
    pane(page, ROWS).locator(".word").first.wait_for()
    wait_until_quiet(page)
    table = right.map(layer(kind), kind="cross")[0].mean(0)  # of all heads, as Type has it
    assert "".join(pane(page, COLUMNS).locator(".word").all_inner_texts()) == READ + END_LABEL
    pane(page, ROWS).locator(".word", has_text="homme").hover()
    wait_until(page, "document.querySelector('.text-links h2').textContent.includes('homme')")
    wait_until_quiet(page)
    weights = table[right.tokens.rows.index(" homme")]
    shades = darkness(page, COLUMNS)
    assert shades[int(weights.argmax())] == max(shades) > min(shades) == shades[int(weights.argmin())]
    first = page.locator(".text-links button, .text-links a").first.inner_text()
    assert right.tokens.columns[int(weights.argmax())].strip() in first
    assert f"{float(weights.max()):.3g}"[:4] in first
    pane(page, COLUMNS).locator(".word", has_text="horse").hover()
    wait_until(page, "document.querySelector('.text-links h2').textContent.includes('receives most attention from')")
    wait_until_quiet(page)
    column = table[:, right.tokens.columns.index(" horse")]
    shades = darkness(page, ROWS)
    assert shades[int(column.argmax())] == max(shades) > min(shades) == shades[int(column.argmin())]
    assert (
        page.get_by_role("heading", name=COLUMNS).bounding_box()["y"]
        < page.get_by_role("heading", name=ROWS).bounding_box()["y"]
    )


def test_the_map_has_the_words_of_both_texts_along_its_axes(open_page, address, right, kind):
    page = type_text(open_page(address))
    page.get_by_role("navigation", name="The same tokens").get_by_role("link", name="Map").click()
    page.wait_for_selector("#stage svg, #stage canvas")
    wait_until_quiet(page)
    page.get_by_role("button", name="Save").click()
    with page.expect_download() as saving:
        page.get_by_role("menuitem", name="SVG").click()
    drawn = saving.value.path().read_text(encoding="utf-8")
    assert all(f">{word.strip()}<" in drawn for word in (*right.tokens.rows, *right.tokens.columns))


def test_steps_of_additive_attention_tell_its_own_formula_and_its_numbers(open_page, serving):
    model = train_small_translator("additive")
    right = record_translation(adapt_translator("translator", model), READ, 2048)
    page = type_text(open_page(serving(Session(None, adapt_model(train_small_translator("additive"))))))
    page.get_by_role("navigation", name="The same tokens").get_by_role("link", name="Steps").click()
    page.wait_for_selector(".steps-formula b")
    page.locator(".steps-names").get_by_role("button", name="scores").click()
    assert page.locator(".steps-formula").inner_text() == "scores = weightᵀ tanh(q + k)"
    assert not page.get_by_text("divide by").is_visible()
    q = right.tokens.rows.index(" cheval")
    shown = [
        [float(cell.replace("−", "-")) for cell in line.split("\t")[1:]]
        for line in page.locator(".panel tbody").inner_text().splitlines()
    ]
    call = right.calls[q].map.planes.request
    expected = (call.weight * (call.q[0, 0] + call.k[0, 0]).tanh()).sum(-1)
    assert shown[q] == pytest.approx(expected.tolist(), abs=PLACES)
    assert len(shown) == len(right.tokens.rows)
    assert "tanh(" in page.locator(".steps-sum").inner_text()
    page.get_by_role("button", name="q, k, v, weight").click()
    wait_until(page, "document.querySelector('.steps-sentence').textContent.includes('tanh(q + k)')")
    assert page.locator(".panel-figure figcaption").all_inner_texts()[-1].startswith("weight")
    assert torch.equal(call.weight, model.attention.weight)


@pytest.mark.usefixtures("translator_package")
def test_from_the_ordinary_page_one_click_shows_a_translation(open_page, serving):
    page = open_page(serving(Session(None, adapt_model(GPT2.load("pocket")))))
    page.locator("#finding").wait_for()  # its text hides the sentences to try
    page.get_by_role("textbox").fill("")
    page.get_by_role("button", name=f"{SENTENCE} → in French").click()
    pane(page, ROWS).locator(".word").first.wait_for()
    wait_until_quiet(page)
    assert "r=translation" in page.evaluate("location.hash")
    assert "kind=cross" in page.evaluate("location.hash")
    right = record_example()
    assert pane(page, COLUMNS).locator(".word").all_inner_texts() == list(right.tokens.columns)
    assert pane(page, ROWS).locator(".word").all_inner_texts() == list(right.tokens.rows)
    rows, columns = (len(one) for one in (right.tokens.rows, right.tokens.columns))
    assert right.map(MIDDLE, kind="cross").shape == torch.Size((1, 3, rows, columns))
    page.reload()  # the link names it, and it is recorded again where it was not
    pane(page, ROWS).locator(".word").first.wait_for()
    assert pane(page, COLUMNS).locator(".word").all_inner_texts() == list(right.tokens.columns)


@pytest.mark.usefixtures("translator_package")
def test_a_link_to_the_translation_opens_on_a_server_that_never_showed_it(open_page, serving):
    address = serving(Session(None, adapt_model(GPT2.load("pocket"))))
    page = open_page(f"{address}#view=map&r=translation&kind=cross&part=decoder&layer=1")
    page.wait_for_selector("#stage canvas")
    wait_until_quiet(page)
    assert page.get_by_role("combobox", name="Attention").locator("option:checked").inner_text() == "decoder cross"


def test_on_a_phone_a_translation_never_scrolls_sideways(open_page, address):
    page = type_text(open_page(address, width=390, height=844))
    assert page.evaluate("document.querySelector('#stage').scrollWidth <= innerWidth")
    page.get_by_role("link", name="Read in Text").click()
    pane(page, ROWS).locator(".word").first.wait_for()
    wait_until_quiet(page)
    assert page.evaluate("document.querySelector('#stage').scrollWidth <= innerWidth")
