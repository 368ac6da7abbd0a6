"""The pages of an atlas in a browser, opened from the disk."""

import re

import pytest

import regard
from head_atlas.small_atlas import SETTINGS, make_model, make_texts

pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'regard[atlas]'")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("atlas")
    regard.atlas(make_model(), make_texts(), folder, **SETTINGS)
    return (folder / "site").as_uri()


def test_the_grid_is_coloured_by_the_score_that_is_chosen_and_the_list_is_sorted_by_it(open_page, site):
    page = open_page(f"{site}/index.html")
    assert page.locator("#rows tr").count() == 4
    for score in ("entropy", "first token"):
        page.select_option("#score", score)
        shown = [float(text) for text in page.locator("#rows td:nth-child(3)").all_inner_texts()]
        assert shown == sorted(shown, reverse=True)
        expected = page.evaluate("score => ATLAS.heads.map((head) => head.scores[score])", score)
        assert sorted((float(f"{x:.3g}") for x in expected), reverse=True) == shown
        shares = page.evaluate(
            "[...document.querySelectorAll('.grid a')].map((a) => Number(a.style.getPropertyValue('--share')))"
        )
        most = max(expected) if score == "entropy" else 1
        assert shares == pytest.approx([x / most for x in expected], abs=1e-6)


def test_heads_are_found_by_what_their_examples_contain_and_the_link_holds_it(open_page, site):
    page = open_page(f"{site}/index.html")
    page.fill("#text", "THE")
    found = page.locator("#rows tr").count()
    assert 0 < found <= 4
    for text in page.locator(".found b").all_inner_texts():
        assert text == "the"
    page.fill("#text", "no such words")
    assert "No head has an example" in page.inner_text("#count")
    page.fill("#text", "the")
    again = open_page(page.evaluate("location.href"))  # page.url changes later
    assert again.input_value("#text") == "the"
    assert again.locator("#rows tr").count() == found


def test_a_head_has_its_page_with_examples_whose_weights_are_shown(open_page, site):
    page = open_page(f"{site}/index.html")
    page.locator(".grid a").nth(2).click()
    page.wait_for_url(re.compile(r"/1\.0\.html"))
    assert page.inner_text("h1").startswith("Head 1.0 of")
    assert page.locator(".example .query").count() > 0
    assert "the stronger the color of another" in page.inner_text("body")  # which is brighter in the dark
    weights = page.locator(".example span[title]").evaluate_all("(all) => all.map((one) => Number(one.title))")
    assert weights
    assert all(0 <= weight <= 1 for weight in weights)
    page.get_by_role("link", name="head 1.1").click()
    page.wait_for_url(re.compile(r"/1\.1\.html"))
    page.get_by_role("link", name="all heads").click()
    page.wait_for_url(re.compile(r"/index\.html"))


@pytest.mark.parametrize("name", ["index.html", "1.0.html"])
@pytest.mark.parametrize("dark", [False, True])
def test_nothing_is_wider_than_a_phone(open_page, site, name, dark):
    page = open_page(f"{site}/{name}", width=360, height=740, dark=dark)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
