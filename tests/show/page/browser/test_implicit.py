"""The view of the layers without a softmax: the numbers at the pointer and at the selected entry are those of the map."""

import pytest

import regard
from regard.show.page.session import Session
from show.implicit_recordings import H, SiluAttention, SoftmaxAttention, make_mamba_adapter, pool_signed, record_implicit
from show.page.browser.page_waits import link, wait_until, wait_until_settled

T, LONG = 11, 307
VALUE = "document.querySelector('.implicit-value')?.title"


@pytest.fixture(scope="module")
def mixed():
    return record_implicit(T, SoftmaxAttention, SiluAttention)


@pytest.fixture(scope="module")
def pure():
    return record_implicit(LONG, SiluAttention, SiluAttention, batch=1)


@pytest.fixture(scope="module")
def addresses(mixed, pure, serving, tmp_path_factory):
    """The pages of both recordings, live and as files."""
    place, found = tmp_path_factory.mktemp("implicit"), {}
    for name, recording in (("mixed", mixed), ("pure", pure)):
        regard.page(recording, place / f"{name}.html")
        session = Session()
        session.add_recording(recording)
        found |= {f"{name} file": (place / f"{name}.html").as_uri(), f"{name} server": serving(session)}
    return found


def hover(page, q, k, tokens):
    box = page.locator(".implicit-sheet canvas").bounding_box()
    page.mouse.move(box["x"] + (k + 0.5) * box["width"] / tokens, box["y"] + (q + 0.5) * box["height"] / tokens)


def read_value(page, expected):
    """The number of the entry, once it is near what is expected."""
    wait_until(page, f"Math.abs({VALUE} - {float(expected)}) <= 1e-6 * Math.abs({float(expected)})")
    return float(page.evaluate(VALUE))


@pytest.mark.parametrize("where", ["file", "server"])
def test_an_entry_under_the_pointer_is_that_of_the_map_with_its_two_words(open_page, addresses, mixed, where):
    dense = mixed.map(0, kind="implicit").dense()
    page = wait_until_settled(open_page(f"{addresses[f'mixed {where}']}#view=implicit&b=1&channel=2"))
    assert page.locator(".implicit-layers button").all_inner_texts() == [f"1\n{mixed.map(0, kind='implicit').title}, {H} heads"]
    for q, k in ((3, 7), (10, 0)):
        hover(page, q, k, T)
        assert read_value(page, dense[1, 2, q, k]) == pytest.approx(float(dense[1, 2, q, k]), rel=2**-23)
        assert page.locator(".implicit-entry").inner_text().endswith(f"query ‘b{q}’ at {q}, key ‘b{k}’ at {k}")
    page.mouse.down()
    page.mouse.up()
    page.mouse.move(2, 2)
    assert (link(page)["q"], link(page)["k"]) == ("10", "0")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowRight")
    read_value(page, dense[1, 2, 9, 1])
    page.keyboard.press("[")
    wait_until_settled(page)
    read_value(page, dense[1, 1, 9, 1])


def test_the_colors_are_on_the_side_of_the_sign_and_the_legend_says_so(open_page, addresses, mixed):
    page = wait_until_settled(open_page(f"{addresses['mixed file']}#view=implicit"))
    dense = mixed.map(0, kind="implicit").dense()[0, 0]
    pixels = page.evaluate(
        "[...document.querySelector('.implicit-sheet canvas').getContext('2d').getImageData(0, 0, 11, 11).data]"
    )
    for n, value in enumerate(dense.flatten().tolist()):
        red, _, blue, _ = pixels[4 * n : 4 * n + 4]
        if abs(value) > 0.05 * float(dense.abs().max()):
            assert (blue > red) == (value > 0)
    said = page.locator("#legend .legend").get_attribute("aria-label")
    assert "signed entries, whose rows need not sum to 1: right above 0, left below 0" in said
    assert page.locator("#legend .sign").all_inner_texts() == ["above 0", "below 0"]


@pytest.mark.parametrize("where", ["file", "server"])
def test_a_recording_without_any_softmax_opens_on_this_view_and_no_view_of_weights(open_page, addresses, pure, where):
    page = wait_until_settled(open_page(addresses[f"pure {where}"]))
    assert link(page)["view"] == "implicit"
    assert page.locator("#views a").all_inner_texts() == ["No softmax", "Steps"]
    page.locator("#views a", has_text="Steps").click()
    wait_until(page, "location.hash.includes('view=steps')")
    page.go_back()
    wait_until_settled(page)
    page.locator(".implicit-layers button").nth(1).click()
    wait_until(page, "document.querySelector('#caption').textContent.startsWith('1, head 0')")
    assert link(page)["mixer"] == "1"


def test_a_text_typed_for_a_model_without_a_softmax_opens_on_this_view(open_page, serving):
    page = open_page(f"{serving(Session(None, make_mamba_adapter()))}#view=type")
    page.get_by_role("textbox", name="Your text").fill("w3 w4 w5")
    page.get_by_role("textbox", name="Your text").press("Enter")
    wait_until(page, "document.querySelector('#caption').textContent.includes('entry i, j multiplies')")
    assert (link(page)["view"], link(page)["text"]) == ("implicit", "w3 w4 w5")


def test_generate_shows_what_the_tokens_of_such_a_model_took_with_its_sign(open_page, serving):
    page = open_page(f"{serving(Session(None, make_mamba_adapter()))}#view=generate")
    page.get_by_role("textbox", name="Prompt").fill("w3 w4 w5")
    page.locator("select[name=tokens]").select_option("5")
    page.get_by_role("button", name="Generate").click()
    wait_until(page, "document.querySelector('.generate-after a')")
    looked = page.evaluate(f"fetch('/api/r/{link(page)['r']}/story').then((one) => one.json())")["lines"][2]["looked"]
    page.locator(".generate-came .word").nth(2).click()
    wait_until(page, "document.querySelector('.generate-looked li')")
    shown = page.locator(".generate-looked .numbers").all_inner_texts()
    assert [one[0] for one in shown] == ["+" if near["weight"] > 0 else "−" for near in looked]
    assert [abs(float(one[1:].replace("−", "-"))) for one in shown] == pytest.approx(
        [abs(near["weight"]) for near in looked], rel=6e-3
    )
    assert "Signed entries" in page.locator(".generate-side").inner_text()
    assert "this model has none" in page.locator(".generate-side").inner_text()
    assert page.locator(".legend .sign").all_inner_texts() == ["above 0", "below 0"]
    page.locator(".generate-after a").click()
    wait_until(page, "document.querySelector('#caption').textContent.includes('entry i, j multiplies')")
    page.go_back()
    page.reload()
    wait_until(page, "document.querySelectorAll('.generate-looked li').length > 0")
    assert page.locator(".error:visible").count() == 0


def test_an_entry_of_a_long_text_is_computed_alone_and_its_pixel_is_the_pooled_number(open_page, addresses, pure):
    dense = pure.map(1, kind="implicit").dense()[0, 2]
    for how in ("mean", "max"):
        page = wait_until_settled(open_page(f"{addresses['pure server']}#view=implicit&mixer=1&channel=2&q=301&k=17&how={how}"))
        read_value(page, dense[301, 17])
        pixel = float(page.locator(".implicit-pixel").get_attribute("title"))
        expected = pool_signed(dense, 256, 256, how)
        row, column = (next(r for r in range(256) if (r + 1) * LONG // 256 > token) for token in (301, 17))
        assert pixel == pytest.approx(float(expected[row, column]), rel=1e-6)


def test_a_mixed_recording_opens_on_its_softmax_and_other_views_do_not_list_the_layer(open_page, addresses):
    page = wait_until_settled(open_page(addresses["mixed file"]))
    assert link(page)["view"] == "text"
    assert "No softmax" in page.locator("#views a").all_inner_texts()
    page.goto(f"{addresses['mixed file']}#view=heads")
    wait_until_settled(page)
    assert page.locator("select[aria-label=layer]").count() == 0 or page.locator("select[aria-label=layer] option").count() == 1


@pytest.mark.parametrize("dark", [False, True])
def test_it_fits_a_phone_and_is_reached_by_the_keyboard(open_page, addresses, dark):
    page = wait_until_settled(open_page(f"{addresses['mixed file']}#view=implicit", width=360, height=740, dark=dark))
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.evaluate("document.querySelector('#stage').scrollWidth <= document.querySelector('#stage').clientWidth")
    box = page.locator(".implicit-sheet canvas").bounding_box()
    assert box["width"] > 150
    assert box["x"] + box["width"] <= 360
    page.locator(".implicit-sheet canvas").focus()
    page.keyboard.press("ArrowDown")
    wait_until(page, "location.hash.includes('q=10')")
    page.locator(".implicit-sheet canvas").focus()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.matches('.implicit-layers button')")
