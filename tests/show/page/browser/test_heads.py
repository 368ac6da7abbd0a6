"""The Heads view: every head as a small picture, named, sorted and filtered as regard.heads says."""

import pytest
import torch

import regard
from regard.observe.classification.head_kinds import TELLING_KINDS
from regard.show.page.session import Session
from show.page.browser.page_waits import link, wait_until, wait_until_settled
from show.page.browser.recordings import PLAIN, draw_queries_and_keys, expect_digits, record_layers, space_words

LAYERS, HEADS, T = 3, 5, 29
Q, K = draw_queries_and_keys(LAYERS, HEADS, T)
Q[1, 0, 2], K[1, 0, 2] = 30 * torch.eye(T, 11).roll(-1, 0)[:T], torch.eye(T, 11)
K[2, 0, 0, 0] = 4 * Q[2, 0, 0].mean(0) / Q[2, 0, 0].mean(0).norm() ** 2
Q[2, 0, 0] += 3 * K[2, 0, 0, 0]


@pytest.fixture(scope="module")
def recording():
    return record_layers(Q, K, space_words(PLAIN, T))


@pytest.fixture(scope="module")
def address(serving, recording):
    return serving(Session(recording))


def list_head_names(page) -> list[str]:
    return page.locator(".head-name").all_inner_texts()


def wait_until_drawn(page):
    wait_until_settled(page)
    wait_until(page, "!document.querySelector('.heads-controls select').disabled")
    return page


def test_every_head_is_there_with_the_kind_that_heads_finds(open_page, address, recording):
    page = wait_until_drawn(open_page(f"{address}#view=heads"))
    expected = {f"{row.layer}.{row.head}": row.kind for row in regard.heads(recording)}
    assert dict(zip(list_head_names(page), page.locator(".head-kind").all_inner_texts(), strict=True)) == expected
    assert len({row.kind for row in regard.heads(recording)}) > 1
    sure = [row for row in regard.heads(recording) if row.kind != "unclear"]
    cards = page.locator(".clearest li")
    assert 0 < cards.count() <= min(5, len(sure))
    for card in cards.all():
        (row,) = [
            row for row in sure if card.locator("h3").inner_text() == f"Head {row.head} of layer {row.layer} · {row.kind}"
        ]
        assert card.locator("p").first.inner_text().lower() == f"{row.sentence}.".lower()
    kinds = [card.inner_text().partition(" · ")[2] for card in cards.locator("h3").all()]
    assert kinds[: len(set(kinds))] == [kind for kind in (*TELLING_KINDS, "local", "broad") if kind in kinds]
    cards.first.get_by_role("link", name="Text").click()
    wait_until(page, "location.hash.includes('view=text')")
    assert cards.count() == 0


def test_they_are_sorted_by_a_detector(open_page, address, recording):
    page = wait_until_drawn(open_page(f"{address}#view=heads"))
    page.get_by_label("sort by").select_option("entropy")
    rows = list(regard.heads(recording).sort_by("entropy"))
    assert list_head_names(page) == [f"{row.layer}.{row.head}" for row in rows]
    shown = [float(text) for text in page.locator(".head-score").all_inner_texts()]
    assert shown == [expect_digits(row.scores["entropy"]) for row in rows]
    assert link(page)["by"] == "entropy"


def test_one_kind_alone_is_shown(open_page, address, recording):
    page = wait_until_drawn(open_page(f"{address}#view=heads"))
    kind = next(row.kind for row in regard.heads(recording) if row.kind == "first token")
    page.locator(f"[data-control='only {kind}']").click()
    assert list_head_names(page) == [f"{row.layer}.{row.head}" for row in regard.heads(recording).select_kind(kind)]


def test_a_click_opens_the_map_of_a_head(open_page, address):
    page = wait_until_drawn(open_page(f"{address}#view=heads"))
    page.get_by_role("link", name="Layer 1, head 2").click()
    wait_until(page, "document.querySelector('#caption').textContent.includes('Layer 1, head 2')")
    assert link(page)["view"] == "map"


def test_arrows_and_enter_do_the_same(open_page, address):
    page = wait_until_drawn(open_page(f"{address}#view=heads"))
    for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
        page.keyboard.press(key)
    assert (link(page)["layer"], link(page)["head"]) == ("1", "2")
    page.keyboard.press("Enter")
    wait_until(page, "document.querySelector('#caption').textContent.includes('Layer 1, head 2')")


def test_what_a_kind_of_head_does_is_said_in_words_and_not_by_the_pointer_alone(open_page, address, recording):
    page = wait_until_settled(open_page(f"{address}#view=heads"))
    wait_until(page, "!document.querySelector('.heads-controls select').disabled")
    row = next(iter(regard.heads(recording)))
    kind = row.kind
    verb = "has " if kind == "unclear" else ""  # its sentence begins with "no clear kind"
    assert page.locator(".heads-said").inner_text() == f"Head 0.0 is selected; it {verb}{row.sentence}."
    page.locator(f"[data-control='only {kind}']").click()
    wait_until(page, f"document.querySelector('.heads-said').textContent.startsWith('{kind}: ')")
