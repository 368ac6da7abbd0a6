"""The page as one file, opened from a disk: the same views, from the data that it carries."""

import itertools

import pytest
import torch

from bounds import sum_bound
from regard.show.page.finding import find_finding
from regard.show.page.recording_entry import RecordingEntry
from regard.show.page.session import Session
from regard.show.page.single_file import page as write
from show.page.browser.page_waits import link, wait_until, wait_until_settled
from show.page.browser.recordings import (
    CODE,
    EVIL,
    PLAIN,
    code_bounds,
    draw_queries_and_keys,
    expect_weight,
    record_layers,
    space_words,
    weights,
)
from show.page.server_client import rows_and_keys

LAYERS, HEADS, T = 2, 3, 13
Q, K = draw_queries_and_keys(LAYERS, HEADS, T)


@pytest.fixture(scope="module")
def recording():
    return record_layers(Q, K, space_words(PLAIN, T))


@pytest.fixture(scope="module")
def address(recording, tmp_path_factory):
    path = tmp_path_factory.mktemp("one") / "page.html"
    write(recording, path)
    return path.as_uri()


def test_it_opens_on_its_finding(open_page, address, recording):
    page = wait_until_settled(open_page(address))
    found = find_finding(RecordingEntry("r", recording), lambda: None)
    wait_until(page, "document.querySelector('#finding').checkVisibility() && document.querySelector('.word.selected')")
    assert page.locator("#finding").inner_text() == " ".join(found.sentences)
    assert page.locator(".word.selected").get_attribute("data-n") == str(found.q)


def test_the_map_says_the_weights_of_attend(open_page, address):
    page = wait_until_settled(open_page(f"{address}#view=map&layer=1&head=2&q=9&k=4"))
    expected = weights(Q, K, 1, 2)[9]
    wait_until(page, "document.querySelector('.readout dd').title !== ''")
    fields = page.locator(".readout dd")
    assert float(fields.nth(0).get_attribute("title").split()[0]) == expect_weight(Q, K, 1, 2, 9, 4)
    q, k = Q[1, 0, 2, 9].double(), K[1, 0, 2, 4].double()
    allowed = sum_bound(torch.float32, 11 + 1, float(q.abs() @ k.abs()) / 11**0.5)
    assert float(fields.nth(1).get_attribute("title")) == pytest.approx(float(q @ k) / 11**0.5, abs=allowed)
    assert fields.nth(2).inner_text() == f"{1 + int((expected[:10] > expected[4]).sum())} of 10"
    wait_until(page, "document.querySelector('.readout-links .link')")
    assert int(page.locator(".readout-links .link .note").first.inner_text()) == int(expected.argmax())


def test_the_text_is_shaded_both_ways_and_by_several_heads(open_page, address):
    page = wait_until_settled(open_page(f"{address}#view=text&heads=0,2&q=11"))
    both, allowed = ((found(Q, K, 0, 0) + found(Q, K, 0, 2)) / 2 for found in (weights, code_bounds))
    allowed = allowed + CODE * both  # the mean of two codes is a code again
    wait_until(page, "document.querySelector('.text-links .link')")
    told = float(page.locator(".text-links .link").first.get_attribute("title"))
    assert told == pytest.approx(float(both[11].max()), abs=float(allowed[11, both[11].argmax()]))
    page.keyboard.press("w")
    wait_until(page, "document.querySelector('.text-links h2')?.textContent.includes('receives most attention from')")
    told = float(page.locator(".text-links .link").first.get_attribute("title"))
    assert told == pytest.approx(float(both[:, 11].max()), abs=float(allowed[both[:, 11].argmax(), 11]))


def test_every_view_of_it_opens_and_back_works(open_page, address):
    page = wait_until_settled(open_page(f"{address}#view=text"))
    names = page.locator("#views a").all_inner_texts()
    assert "Map" in names
    for name in names:
        page.locator("#views").get_by_role("link", name=name).click()
        wait_until_settled(page)
        assert page.locator("#stage .error").count() == 0
    seen = link(page)["view"]
    page.go_back()
    assert link(page)["view"] != seen


def test_words_that_break_pages_stay_text(open_page, tmp_path):
    path = tmp_path / "evil.html"
    write(record_layers(*draw_queries_and_keys(1, 2, len(EVIL)), EVIL), path)
    page = wait_until_settled(open_page(f"{path.as_uri()}#view=text"))
    assert page.locator(".word").count() == len(EVIL)
    assert page.locator(".word").all_inner_texts()[:2] == EVIL[:2]
    assert page.locator("#stage img, #stage script").count() == 0


def test_a_file_that_holds_no_single_weights_says_so_where_one_is_asked_for(open_page, tmp_path, monkeypatch):
    from regard.show.page import single_file

    monkeypatch.setattr(single_file, "MAX_PICTURES_BYTES", 2**17)
    path = tmp_path / "long.html"
    q, k = draw_queries_and_keys(1, 1, 700)
    single_file.page(record_layers(q, k, space_words(PLAIN, 700)), path)
    page = wait_until_settled(open_page(f"{path.as_uri()}#view=map&q=650&k=3"))
    wait_until(page, "document.querySelector('#stage .error')")
    assert "regard serve" in page.locator("#stage .error").first.inner_text()
    light = page.evaluate(
        """() => {
            const canvas = document.querySelector("canvas");
            const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
            return new Set(Array.from({ length: data.length / 4 }, (_, n) => data[4 * n + 2])).size;
        }"""
    )
    assert light > 20  # shades of it are there all the same


def test_its_numbers_and_the_servers_are_the_same(open_page, address, serving, recording):
    pages = [
        f"{at}#view=map&head=1&q={q}&k={k}"
        for (q, k), at in itertools.product([(5, 2), (12, 12)], [address, serving(Session(recording))])
    ]
    told = []
    for at in pages:
        page = wait_until_settled(open_page(at))
        wait_until(page, "document.querySelector('.readout dd').title !== ''")
        told.append(page.locator(".readout dd").all_inner_texts()[:3])
    assert told[0] == told[1]
    assert told[2] == told[3]


@pytest.mark.parametrize("step", ["q, k", "scores", "weights"])
def test_the_numbers_of_its_steps_and_the_servers_are_the_same(open_page, address, serving, recording, step):
    told = []
    for at in (address, serving(Session(recording))):
        page = wait_until_settled(open_page(f"{at}#view=steps&layer=1&head=2&q=9&step={step}"))
        page.locator(".panel td").first.wait_for()
        told.append(page.evaluate("[...document.querySelectorAll('.panel td')].map((one) => [one.textContent, one.title])"))
    assert len(told[0]) >= T * T
    assert told[0] == told[1]


def test_a_head_with_numbers_that_are_not_finite_leaves_the_others_and_says_why_it_has_no_steps(open_page, tmp_path):
    q, k = torch.randn(2, 1, 2, 7, 4, generator=torch.Generator().manual_seed(0))
    q[0, 1, 3] = torch.nan
    write(rows_and_keys(q, k), tmp_path / "page.html")
    page = open_page((tmp_path / "page.html").as_uri() + "#view=steps&head=1")
    page.get_by_text("q of this head contains numbers that are not finite").wait_for()
    page.evaluate("location.hash = '#view=steps&head=0&step=weights'")
    page.locator(".panel td").first.wait_for()
    page.evaluate("location.hash = '#view=map&head=1&q=2&k=1'")
    wait_until(page, "document.querySelector('.readout dd').title !== ''")


@pytest.mark.parametrize("broken", ["query", "key"])
@pytest.mark.parametrize("where", ["the file", "the server"])
def test_a_row_that_is_nan_is_said_to_be_and_not_hidden(open_page, serving, tmp_path, where, broken):
    q, k = torch.randn(2, 1, 2, 7, 4, generator=torch.Generator().manual_seed(0))
    if broken == "query":
        q[0, 1, 3] = torch.nan
    else:
        k[0, 1, 2] = torch.nan
    recording = rows_and_keys(q, k)
    recording.tokens = space_words(PLAIN, 7)
    write(recording, tmp_path / "page.html")
    at = (tmp_path / "page.html").as_uri() if where == "the file" else serving(Session(recording))
    page = wait_until_settled(open_page(f"{at}#view=map&head=1&q=3&k=1"))
    for key, fields in ((1, ["not a number (NaN)", "–", "–"]), (5, ["hidden from this query", "–", "–"])):
        page.evaluate(f"location.hash = '#view=map&head=1&q=3&k={key}'")
        wait_until(page, f"document.querySelector('.readout dd').textContent === '{fields[0]}'")
        assert page.locator(".readout dd").all_inner_texts()[:3] == fields
    page.evaluate("location.hash = '#view=text&head=1&q=3'")
    page.get_by_text("it sees no token, or they are not numbers (NaN)").wait_for()
    page.evaluate("location.hash = '#view=compare&head=0&head2=1&q=3&k=1'")
    page.get_by_text("second: not a number (NaN)").wait_for()
