"""The Image view: what a patch or a word looks at in an image, by hovering, by the keyboard and in the link."""

import json
from functools import cache

import numpy as np
import pytest
import torch

import regard
from observe.family import Widened
from regard.show.page.image_entry import make_entry
from regard.show.page.session import Session
from regard.show.page.single_file import page as write
from regard.show.page.single_file import write_file
from show.page.browser.page_waits import link, wait_until, wait_until_settled
from show.page.browser.recordings import CODE, expect_digits
from show.vision_models import llava, make_llava, make_pixels, make_vit, swin, vit

CANVAS = "document.querySelector('.image-sheet canvas')"
IMAGE = np.arange(30 * 42 * 3, dtype=np.int64).astype(np.uint8).reshape(30, 42, 3)


@pytest.fixture(scope="module")
def addresses(tmp_path_factory):
    """A page of a ViT, of a Swin and of a language model that sees."""
    place = tmp_path_factory.mktemp("image")
    for make in (vit, swin, llava):
        write(make()[0], place / f"{make.__name__}.html", image=IMAGE)
    return {make.__name__: (place / f"{make.__name__}.html").as_uri() for make in (vit, swin, llava)}


def hover(page, row, column, rows, columns):
    box = page.locator(".image-sheet canvas").bounding_box()
    page.mouse.move(box["x"] + (column + 0.5) * box["width"] / columns, box["y"] + (row + 0.5) * box["height"] / rows)


def expect_caption(page, text):
    wait_until(page, f"document.querySelector('#caption').textContent.includes({text!r})")


def read_largest(page):
    return float(page.locator(".image-links .link").first.get_attribute("title"))


def test_a_page_with_an_image_opens_on_it_with_the_class_token(open_page, addresses):
    page = wait_until_settled(open_page(addresses["vit"]))
    assert link(page)["view"] == "image"
    expect_caption(page, "Layer 1, mean of its 3 heads")
    expect_caption(page, "class token")
    row = vit()[1][1][0].mean(0)[0]
    assert read_largest(page) == pytest.approx(float(row.max()), rel=3 * CODE)
    assert page.locator(".image-words .word").all_inner_texts() == ["class token"]


def test_a_patch_under_the_pointer_shows_where_it_looks_and_a_click_keeps_it(open_page, addresses):
    page = wait_until_settled(open_page(f"{addresses['vit']}#view=image&layer=0&head=2"))
    hover(page, 3, 5, 5, 7)
    expect_caption(page, "patch 3,5")
    row = vit()[1][0][0, 2, 1 + 3 * 7 + 5]
    wait_until(page, f"Math.abs(document.querySelector('.image-links .link').title / {float(row.max())} - 1) < 0.002")
    page.mouse.down()
    page.mouse.up()
    page.mouse.move(2, 2)
    expect_caption(page, "patch 3,5")
    assert link(page)["q"] == "27"


def test_the_keyboard_moves_from_patch_to_patch_and_to_the_class_token(open_page, addresses):
    page = wait_until_settled(open_page(f"{addresses['vit']}#view=image&layer=0&head=2&q=1"))
    for key in ("ArrowRight", "ArrowDown", "ArrowDown", "ArrowLeft", "ArrowLeft"):
        page.keyboard.press(key)
    expect_caption(page, "patch 2,0")
    page.keyboard.press("Home")
    expect_caption(page, "class token")
    page.keyboard.press("]")
    assert link(page)["layer" if "layer" in link(page) else "view"] is not None
    expect_caption(page, "class token")


def test_a_patch_of_swin_stays_the_same_patch_across_windows_and_layers(open_page, addresses):
    page = wait_until_settled(open_page(f"{addresses['swin']}#view=image&layer=0"))
    hover(page, 0, 3, 8, 8)
    page.mouse.down()
    page.mouse.up()
    expect_caption(page, "patch 0,3")
    page.mouse.move(2, 2)
    page.keyboard.press("ArrowRight")
    expect_caption(page, "patch 0,4")
    assert link(page)["b"] == "1"
    page.keyboard.press(".")
    expect_caption(page, "Layer 1")
    expect_caption(page, "patch 0,4")
    page.keyboard.press(".")
    expect_caption(page, "patch 0,2")  # a patch is now two by two of them
    assert page.locator("#stage .error").count() == 0


def test_a_word_of_a_text_looks_at_the_image_beside_it(open_page, addresses):
    page = wait_until_settled(open_page(addresses["llava"]))
    expect_caption(page, "‘this’")
    assert page.locator(".image-words .word").all_inner_texts() == ["<s>", "what", "is", "this"]
    page.locator(".image-words .word", has_text="is").first.hover()
    expect_caption(page, "‘is’")
    page.locator(".image-words .word", has_text="what").focus()
    expect_caption(page, "‘what’")
    row = llava()[1][1][0].mean(0)[1]
    wait_until(page, f"Math.abs(document.querySelector('.image-links .link').title / {float(row.max())} - 1) < 0.002")


def test_a_page_opens_on_the_layer_and_the_word_of_its_state(open_page, tmp_path):
    recording = llava()[0]
    entry = make_entry(recording, image=IMAGE)
    attention = next(one for one in entry.attention_layers if one.part == "language_model")
    query = attention.shapes[0][2] - 2  # the word before the last
    entry.state = {"kind": "self", "part": attention.part, "layer": 0, "q": query}
    write_file(entry, tmp_path / "word.html")
    page = wait_until_settled(open_page((tmp_path / "word.html").as_uri()))
    expect_caption(page, "‘is’")
    assert link(page)["q"] == str(query)
    assert link(page).get("layer", "0") == "0"


def test_the_rollout_of_a_patch_is_shown_where_all_layers_have_the_same_tokens(open_page, addresses):
    page = wait_until_settled(open_page(f"{addresses['vit']}#view=image&layer=1&q=27"))
    page.get_by_role("button", name="rollout").click()
    expect_caption(page, "Rollout up to layer 1")
    row = regard.rollout(vit()[0], [27])[0, 0]
    wait_until(page, f"Math.abs(document.querySelector('.image-links .link').title / {float(row.max())} - 1) < 0.002")
    assert link(page)["of"] == "rollout"
    page = wait_until_settled(open_page(addresses["swin"]))
    assert page.get_by_role("button", name="rollout").count() == 0


@pytest.mark.parametrize("dark", [False, True])
def test_it_fits_a_telephone_and_has_its_own_dark_colors(open_page, addresses, dark):
    page = wait_until_settled(open_page(addresses["llava"], width=390, height=800, dark=dark))
    expect_caption(page, "‘this’")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    box = page.locator(".image-sheet canvas").bounding_box()
    assert box["width"] > 200
    assert box["width"] / box["height"] == pytest.approx(42 / 30, rel=0.02)
    inks = page.evaluate(
        """() => {
            const canvas = document.querySelector(".image-sheet canvas");
            return [...canvas.getContext("2d").getImageData(3, 3, 1, 1).data];
        }"""
    )
    assert (sum(inks[:3]) < 3 * 128) == dark


def write_batch(path, images, rows=2):
    """A page of rows of texts with two images each."""
    model, ids = make_llava(), torch.tensor([[1, *[50] * 9, 7, *[50] * 9, 8]])
    with torch.no_grad(), regard.record(model) as recording:
        model(input_ids=ids.expand(rows, -1), pixel_values=make_pixels(9, 9).expand(2 * rows, -1, -1, -1))
    write(recording, path, image=images)
    return path.as_uri()


def expect_width(page, width):
    """The image of 30 pixels of height that is shown has this width."""
    wait_until(page, f"(box => Math.abs(30 * box.width / box.height - {width}) < 1)({CANVAS}.getBoundingClientRect())")


def test_each_image_of_each_text_of_a_batch_is_shown_with_its_own_weights(open_page, tmp_path):
    images = [np.zeros((30, width, 3), np.uint8) for width in (20, 30, 40, 50)]
    address = write_batch(tmp_path / "batch.html", images)
    page = wait_until_settled(open_page(f"{address}#view=image&kind=self&part=language_model"))
    expect_width(page, 20)
    page.get_by_label("next image").click()
    expect_width(page, 30)
    page.get_by_label("next text").click()
    expect_width(page, 50)
    assert link(page)["b"] == "1"
    page.get_by_label("previous image").click()
    expect_width(page, 40)
    page = wait_until_settled(open_page(f"{address}#view=image&kind=self&part=vision_tower"))
    for width in (20, 30, 40, 50):
        expect_width(page, width)
        if width < 50:
            page.get_by_label("next image").click()


@cache
def vit_with_pull():
    """The ViT recorded with its graph, and the pull of its weights on a number that the class token and all layers decide."""
    model = make_vit()
    with Widened(), regard.record(model, keep="values") as recording:
        output = model(pixel_values=make_pixels(15, 21)).last_hidden_state
    return recording, recording.attribute(output[0, 0, 2] - output[0, 0, 7])


PULL = {"image": IMAGE, "number": "the logit of cat"}
NOTE = "document.querySelector('.image-note')"


@pytest.fixture(scope="module", params=["live", "file"])
def with_pull(request, serving, tmp_path_factory):
    """The address of a page with a pull, served and in a file."""
    recording, found = vit_with_pull()
    if request.param == "live":
        return serving(Session(make_entry(recording, attribution=found, **PULL)))
    place = tmp_path_factory.mktemp("pull") / "pull.html"
    write(recording, place, attribution=found, **PULL)
    return place.as_uri()


def read_links(page):
    """The places and numbers of the strongest links, all digits."""
    links = page.locator(".image-links .link").all()
    return {
        int(one.locator(".note").inner_text()): float(one.get_attribute("title").partition(",")[0].replace("\u2212", "-"))
        for one in links
    }


def expect_links(page, row):
    """The six numbers of a row that are largest in size are listed, with three digits and their signs."""
    most = row.abs().topk(6).indices.tolist()
    wait_until(page, f"document.querySelector('.image-links .link .note')?.textContent === '{most[0]}'")
    assert read_links(page) == {place: expect_digits(row[place], 1e-6 * row.abs().max()) for place in most}


@pytest.mark.parametrize(("heads", "chosen"), [("all", [0, 1, 2]), ("0,2", [0, 2]), (None, [1])])
def test_the_pull_of_a_query_is_that_of_attribute(open_page, with_pull, heads, chosen):
    row = vit_with_pull()[1].map(0)[0, chosen, 27].mean(0)
    extra = f"&heads={heads}" if heads else ""
    page = wait_until_settled(open_page(f"{with_pull}#view=image&layer=0&head=1&q=27{extra}"))
    page.get_by_role("button", name="pull").click()
    expect_caption(page, "how the attention of patch 3,5 (row, column) to it moves the logit of cat; all patches together ")
    assert link(page)["of"] == "pull"
    expect_links(page, row)
    shown = page.locator("#caption").inner_text().partition("all patches together ")[2].replace("\u2212", "-")
    assert float(shown) == expect_digits(row[1:].sum(), 1e-6 * row.abs().sum())
    assert page.locator(".legend .sign.raises").inner_text() == "raises the logit of cat"
    assert page.evaluate(f"{NOTE} === null")
    assert page.locator("[data-control='scale log']").count() == 0


def test_a_patch_has_the_signed_color_of_its_pull_and_the_pointer_reads_the_number(open_page, with_pull):
    row = vit_with_pull()[1].map(0)[0, :, 0].mean(0)
    page = wait_until_settled(open_page(f"{with_pull}#view=image&layer=0&heads=all&q=0&of=pull"))
    expect_caption(page, "class token")
    patches = [int(row[1:].argmax()), int(row[1:].argmin())]
    colors = page.evaluate(
        """patches => {
            const canvas = document.querySelector(".image-sheet canvas"), { width, height } = canvas;
            const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
            const step = (n, count, size) => Math.floor((n + 0.5) * size / count);
            const at = (n) => step(Math.floor(n / 7), 5, height) * width + step(n % 7, 7, width);
            return patches.map((n) => [...data.slice(4 * at(n), 4 * at(n) + 3)]);
        }""",
        patches,
    )
    for patch, (red, _, blue) in zip(patches, colors, strict=True):
        assert (blue > red) == (row[1 + patch] > 0)
        hover(page, patch // 7, patch % 7, 5, 7)
        expect_caption(page, f"from class token to patch {patch // 7},{patch % 7}: ")
        shown, _, does = page.locator("#caption").inner_text().partition(f"patch {patch // 7},{patch % 7}: ")[2].partition(" ")
        assert float(shown.replace("\u2212", "-")) == expect_digits(row[1 + patch], 1e-6 * row.abs().max())
        assert does == ("(raises it)" if row[1 + patch] > 0 else "(lowers it)")
        page.mouse.move(2, 2)
        wait_until(page, "!document.querySelector('#caption').textContent.includes('from class token')")


def test_a_served_page_shows_the_rollout_and_the_weights_of_its_image(open_page, serving):
    recording = vit()[0]
    page = wait_until_settled(open_page(f"{serving(Session(make_entry(recording, image=IMAGE)))}#view=image&layer=1&q=27"))
    assert read_largest(page) == pytest.approx(float(vit()[1][1][0, 0, 27].max()), rel=3 * CODE)
    page.get_by_role("button", name="rollout").click()
    expect_caption(page, "Rollout up to layer 1")
    row = regard.rollout(recording, [27])[0, 0]
    wait_until(page, f"Math.abs(document.querySelector('.image-links .link').title / {float(row.max())} - 1) < 0.002")
    assert page.get_by_role("button", name="pull").count() == 0
    assert page.locator(".image-note").inner_text().startswith("To see the pull on a number")


def test_the_numbers_of_the_pull_are_saved(open_page, with_pull):
    row = vit_with_pull()[1].map(0)[0, 1, 27]
    page = wait_until_settled(open_page(f"{with_pull}#view=image&layer=0&head=1&q=27&of=pull"))
    expect_links(page, row)
    page.get_by_role("button", name="Save").click()
    with page.expect_download() as download:
        page.get_by_role("menuitem", name="JSON").click()
    records = json.loads(download.value.path().read_text())
    records = records if isinstance(records, list) else records["rows"]
    assert [one["pull"] for one in records] == pytest.approx(row.tolist(), abs=1e-6 * float(row.abs().max()))


def test_a_page_without_an_image_has_no_such_view(open_page, tmp_path):
    write(vit()[0], tmp_path / "plain.html")
    page = wait_until_settled(open_page((tmp_path / "plain.html").as_uri()))
    assert "Image" not in page.locator("#views a").all_inner_texts()


def test_the_picture_is_saved(open_page, addresses):
    page = wait_until_settled(open_page(addresses["vit"]))
    expect_caption(page, "class token")
    page.get_by_role("button", name="Save").click()
    with page.expect_download() as download:
        page.get_by_role("menuitem", name="PNG").click()
    assert download.value.suggested_filename == "regard-image.png"
