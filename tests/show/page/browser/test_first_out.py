"""The switch that takes the first word out, the probe that is one click away, and the choice among several models."""

import pytest
import torch

from regard import GPT2
from regard.models.gpt2_adapter import GPT2Adapter
from regard.show.page.session import Session
from show.page.browser.page_waits import link, wait_until, wait_until_quiet, wait_until_settled
from show.page.server_client import make_sorter, make_writer

TEXT = "Lily had a red ball. Tom had a blue ball. Lily gave her red ball to Tom, and Tom gave his"


@pytest.fixture(scope="module")
def address(serving):
    session = Session(None, GPT2Adapter("pocket", GPT2.load("pocket", torch.float64)))
    session.run_text(TEXT, lambda: None)
    return serving(session)


@pytest.mark.parametrize("view", ["type", "text", "heads", "map"])
def test_one_switch_takes_the_first_word_out_and_puts_it_back(open_page, address, view):
    asked = []
    page = wait_until_settled(
        open_page(f"{address}#view={view}&layer=5&head=4", answered=lambda answer: asked.append(answer.url))
    )
    assert not any("%3Arest" in url or ":rest" in url for url in asked)
    before = page.locator("#stage").inner_html()
    page.locator("[data-control=sink]").click()
    wait_until(page, "document.querySelector('[data-control=sink]').getAttribute('aria-pressed') === 'true'")
    wait_until(page, "document.querySelector('#caption').textContent.includes('without the first token')")
    wait_until_quiet(page)
    assert link(page)["sink"] == "out"
    assert any("%3Arest" in url or ":rest" in url for url in asked)
    if view == "text":
        assert page.locator(".word").first.evaluate("(word) => word.style.backgroundColor") == ""
        assert page.locator("#stage").inner_html() != before
    page.locator("[data-control=sink]").click()
    wait_until(page, "!document.querySelector('#caption').textContent.includes('without the first token')")
    assert "sink" not in link(page)


def test_one_click_probes_the_model(open_page, address):
    page = wait_until_settled(open_page(f"{address}#view=heads"))
    page.get_by_role("button", name="Probe the model").click()
    wait_until(page, "[...document.querySelectorAll('[data-control=by] option')].some((one) => one.value === 'copying')")
    wait_until_quiet(page)
    assert "repeated random tokens" in page.locator(".heads").inner_text()
    assert page.locator(".head-kind", has_text="induction").count() >= 1
    page.get_by_role("button", name="Probe the model").click()
    wait_until(page, "![...document.querySelectorAll('[data-control=by] option')].some((one) => one.value === 'copying')")


def test_models_are_chosen_among_in_type_and_stand_side_by_side_in_compare(open_page, serving):
    address = serving(Session(None, make_sorter(), others=[make_writer()]))
    page = wait_until_settled(open_page(f"{address}#view=type&text=CABBAC"))
    assert page.locator("#stage").inner_text().count("‘sorter’ read") == 1
    page.get_by_role("combobox", name="Model").select_option("writer")
    wait_until(page, "document.querySelector('#stage').innerText.includes('‘writer’ read')")
    wait_until_quiet(page)
    assert link(page)["model"] == "writer"
    page.reload()
    wait_until(page, "document.querySelector('#stage').innerText.includes('‘writer’ read')")
    page.evaluate("location.hash = location.hash.replace('view=type', 'view=compare')")
    wait_until_settled(page)
    page.get_by_role("combobox", name="Model").select_option("sorter")
    wait_until(page, "location.hash.includes('r2=')")
    wait_until_quiet(page)
    assert {link(page)["r"][:6], link(page)["r2"][:6]} == {"writer", "sorter"}
    page.reload()
    wait_until_settled(page)
    assert page.locator(".compare-panes canvas").count() == 3
