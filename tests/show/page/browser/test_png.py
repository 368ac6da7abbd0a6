"""Every view kept as PNG: as large as it stands on screen, twice as fine, on the page's ground, in the colours of attention."""

from xml.etree import ElementTree

import pytest

from regard.models import GPT2
from regard.show.page.model_adapter import adapt_model
from regard.show.page.session import Session
from show.page.browser.page_waits import wait_until_settled

Image = pytest.importorskip("PIL.Image", reason="pillow is not installed: pip install regard[plot]")

ABOUT = 32  # pixels of the page beside what stands there, left and right
# what of each view is kept, and what of that reaches furthest to the right; Steps is drawn anew, each number in its square
ON_SCREEN = {
    "type": (".type-result", ".type-result", ABOUT),
    "text": (".text-panes", ".text-panes", ABOUT),
    "heads": (".heads-sheet", ".head", ABOUT),
    "map": ("#stage canvas", "#stage canvas", 0),
    "steps": None,
    "compare": (".compare-panes", ".compare-panes", ABOUT),
    "generate": (".generate-body", ".generate-body", ABOUT),
}
WIDE = """([all, furthest]) => {
    const edges = [...document.querySelectorAll(furthest)].map((one) => one.getBoundingClientRect().right);
    return Math.max(...edges) - document.querySelector(all).getBoundingClientRect().left;
}"""
GROUND = "getComputedStyle(document.documentElement).backgroundColor.match(/\\d+/g).map(Number)"


@pytest.fixture(scope="module")
def address(serving):
    session = Session(None, adapt_model(GPT2.load("sorter")))
    session.run_text("CBABBCABBC", lambda: None)
    return serving(session)


def draw_view(page, view):
    """The page once the view has drawn all; Generate, what it wrote."""
    if view == "generate":
        page.get_by_role("textbox", name="Prompt").fill("CBABBC")
        page.locator("select[name=tokens]").select_option("5")
        page.get_by_role("button", name="Generate").click()
        page.wait_for_selector(".generate-after a")
    return wait_until_settled(page)


def save_picture(page, kind, folder):
    """The file of what is on screen."""
    page.get_by_role("button", name="Save").click()
    with page.expect_download() as saving:
        page.get_by_role("menuitem", name=kind).click()
    path = folder / saving.value.suggested_filename
    saving.value.save_as(path)
    return path


def read(path):
    """The pixels of a PNG."""
    with Image.open(path) as image:
        return image.convert("RGB")


def colours(image) -> set[tuple[int, ...]]:
    """The colours of a picture that are no greys, as those of its letters and of its ground are."""
    return {colour for _, colour in image.getcolors(2**24) if max(colour) - min(colour) > 24}


@pytest.mark.parametrize(
    ("view", "dark", "scale"), [*((view, False, 1) for view in ON_SCREEN), ("type", True, 1), ("map", True, 3)]
)
def test_a_view_is_kept_as_pixels(open_page, address, view, dark, scale, tmp_path):
    link = f"{address}#view={view}&r=r1&layer=1&head=0&q=6&k=2"
    page = draw_view(open_page(link, dark=dark, device_scale_factor=scale), view)
    path = save_picture(page, "PNG", tmp_path)
    assert path.name == f"regard-{view}.png"
    image, finer = read(path), max(2, scale)
    lines = ElementTree.parse(save_picture(page, "SVG", tmp_path)).getroot().attrib
    assert image.size == (finer * int(lines["width"]), finer * int(lines["height"]))
    if ON_SCREEN[view]:
        *names, about = ON_SCREEN[view]
        assert image.width / finer == pytest.approx(page.evaluate(WIDE, names) + about, abs=1)
    assert list(image.getpixel((0, 0))) == page.evaluate(GROUND)
    assert len(colours(image)) > 50
    caption = image.crop((0, image.height - finer * 80, image.width, image.height))
    assert len(caption.getcolors(2**24)) > 8  # letters stand at its foot
