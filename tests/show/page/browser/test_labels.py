"""Every label stands at its own row or column: in Steps, Compare, Type and the squares of Heads, at any size."""

import random

import pytest

from regard.models import GPT2
from regard.show.page.model_adapter import adapt_model
from regard.show.page.session import Session
from show.page.browser.page_waits import wait_until, wait_until_quiet, wait_until_settled
from show.page.browser.recordings import PLAIN, draw_queries_and_keys, record_layers, space_words
from show.page.server_client import fill_in_ids

SIZES = [*random.Random(7).sample(range(2, 65), 6), 16, 17, 23, 24]
# of each label [text, its middle, start and end of its cell], along both axes; a label may be wider than a cell
SPOTS = """([labels, cells, axis]) => {
    const [from, to] = axis === "x" ? ["left", "right"] : ["top", "bottom"];
    const inked = (one) => { // the boxes of its letters, without those of blanks
        const walk = document.createTreeWalker(one, NodeFilter.SHOW_TEXT);
        const found = [];
        while (walk.nextNode()) {
            const range = document.createRange();
            for (const { 0: text, index } of walk.currentNode.data.matchAll(/\\S+/g)) {
                range.setStart(walk.currentNode, index);
                range.setEnd(walk.currentNode, index + text.length);
                found.push(...range.getClientRects());
            }
        }
        return found.filter((box) => box.width && box.height);
    };
    return labels.map((one, n) => [one, cells[n]]).filter(([one]) => one.textContent.trim()).map(([one, cell]) => {
        const boxes = inked(one);
        const middle = (Math.min(...boxes.map((box) => box[from])) + Math.max(...boxes.map((box) => box[to]))) / 2;
        return [one.textContent, middle, cell.getBoundingClientRect()[from], cell.getBoundingClientRect()[to]];
    });
}"""
PANELS = """() => [...document.querySelectorAll(".panel, .sight-square")].flatMap((table) => {
    const spots = SPOTS;
    const heads = [...table.tHead?.rows[0].cells ?? table.rows[0].cells].slice(1);
    const body = [...table.tBodies[0].rows].filter((row) => row.cells.length > 1 && row.cells[1].tagName === "TD");
    const [names, first] = [0, 1].map((n) => body.map((row) => row.cells[n]));
    return [spots([heads, [...body[0].cells].slice(1), "x"]), spots([names, first, "y"])];
})""".replace("SPOTS", SPOTS)
FRAMES = """([frame, rows, columns]) => {
    const box = document.querySelector(frame).getBoundingClientRect();
    const cells = (labels, from, size) => labels.map((_, n) => ({ getBoundingClientRect: () => ({
        left: box.left + (n * box.width) / labels.length, right: box.left + ((n + 1) * box.width) / labels.length,
        top: box.top + (n * box.height) / labels.length, bottom: box.top + ((n + 1) * box.height) / labels.length }) }));
    const [down, across] = [rows, columns].map((name) => [...document.querySelector(name).children]);
    const spots = SPOTS;
    return [spots([across, cells(across), "x"]), spots([down, cells(down), "y"])];
}""".replace("SPOTS", SPOTS)


@pytest.fixture(scope="module")
def session():
    session = Session(
        record_layers(*draw_queries_and_keys(1, 1, SIZES[0]), space_words(PLAIN, SIZES[0])), adapt_model(GPT2.load("pocket"))
    )
    for size in SIZES[1:]:
        session.add_recording(record_layers(*draw_queries_and_keys(1, 1, size), space_words(PLAIN, size)))
    return session


@pytest.fixture(scope="module")
def address(serving, session):
    return serving(session)


def check(spots, words: list[str]) -> None:
    """Compares labels with words and with their cells; a list may leave some out."""
    for axis in spots:
        assert axis
        places = {text.strip(): [] for text, *_ in axis}
        for text, middle, start, end in axis:
            assert start <= middle <= end, (text, middle, start, end)
            places[text.strip()].append(start)
    across, down = spots
    assert [text.strip() for text, *_ in down] == [word.strip() for word in words]
    assert {text.strip() for text, *_ in across} <= {word.strip() for word in words}


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("size", SIZES)
def test_the_words_of_steps_stand_at_their_cells(open_page, address, session, size, width):
    words = space_words(PLAIN, size)
    page = open_page(fill_in_ids(session, f"{address}#view=steps&r=r{SIZES.index(size) + 1}&step=weights"), width=width)
    page.wait_for_selector(".panel")
    spots = wait_until_quiet(page).evaluate(PANELS)
    check(spots, words)
    assert [text.strip() for text, *_ in spots[0]] == [word.strip() for word in words]


@pytest.mark.parametrize("size", [size for size in SIZES if size <= 24])
def test_the_words_of_compare_and_type_stand_at_their_cells(open_page, address, session, size):
    words = space_words(PLAIN, size)
    r = f"r=r{SIZES.index(size) + 1}"
    page = wait_until_settled(open_page(fill_in_ids(session, f"{address}#view=compare&{r}")))
    wait_until(page, "document.querySelectorAll('.compare-rows span').length > 0")
    check(page.evaluate(FRAMES, [".compare-frame", ".compare-rows", ".compare-columns"]), words)
    page = wait_until_settled(open_page(fill_in_ids(session, f"{address}#view=type&{r}")))
    wait_until(page, "document.querySelectorAll('.type-rows span').length > 0")
    check(page.evaluate(FRAMES, [".type-frame", ".type-rows", ".type-columns"]), words)


def test_the_words_of_who_may_see_whom_stand_at_their_cells(open_page, serving):
    text = "Lily had a red ball."
    session = Session(None, adapt_model(GPT2.load("pocket")))
    session.run_text(text, lambda: None)
    page = open_page(f"{serving(session)}#view=heads&sight=earlier", quiet=False)
    wait_until(page, "document.querySelectorAll('.sight-square').length === 3")
    spots = wait_until_quiet(page).evaluate(PANELS)
    for n in range(3):
        check(spots[2 * n : 2 * n + 2], ["Lily", " had", " a", " red", " ball", "."])
