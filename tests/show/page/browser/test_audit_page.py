"""The page of an audit, opened from a disk: what it draws are the numbers of the audit."""

import re
from itertools import pairwise

import pytest

import regard
from policy_audit.small_models import HEADS, LAYERS, PROMPT, TOKENS, draw_tokens, make_model, record
from regard.policies import H2O, Knorm, Oracle


@pytest.fixture(scope="module")
def audit():
    recording = record(make_model(), draw_tokens())
    recording.tokens = [[f"<w{n}>" for n in range(TOKENS)]] * 2
    return regard.audit(recording, [Knorm(3), Knorm(9), H2O(5), Oracle(4)], prompt=PROMPT)


@pytest.fixture(scope="module")
def address(audit, tmp_path_factory):
    path = tmp_path_factory.mktemp("audit") / "audit.html"
    regard.page(audit, path)
    return path.as_uri()


@pytest.mark.parametrize("dark", [False, True])
def test_every_cell_curve_and_row_is_that_of_the_audit(open_page, address, audit, dark):
    page = open_page(address, dark=dark)
    cells = page.locator("rect title").all_text_contents()
    means = audit.recall[..., PROMPT:].double().mean((2, 4))
    expected = [
        f"head {layer}.{head}: {means[n, layer, head]:.4f}"
        for n in range(4)
        for layer in range(LAYERS)
        for head in range(HEADS)
    ]
    assert cells == expected
    budgets, positions = (page.locator("section", has_text=name).first for name in ("Recall by budget", "Recall by position"))
    assert budgets.locator("text.name").all_text_contents() == ["Knorm", "H2O", "Oracle"]
    assert budgets.locator("g").nth(0).locator("circle").count() == 2
    assert positions.locator("text.name").all_text_contents() == list(audit.labels)
    _, curves = audit.average_by_position("recall", 32)
    shown = [float(text.rpartition(", ")[2]) for text in positions.locator("g").nth(2).locator("title").all_text_contents()]
    assert shown == pytest.approx(curves[2].mean(0).tolist(), abs=5e-5)
    worst = page.locator("ol").nth(2).locator("li").all_inner_texts()
    assert worst == [row.sentence for row in audit.find_worst(5, 2)]
    assert re.search(r"query \d+ '<w\d+>'", worst[0])


def test_the_names_of_curves_do_not_overlap_and_nothing_leaves_a_narrow_window(open_page, address):
    page = open_page(address, width=420)
    for chart in page.locator("section svg[role=img]:has(.curve)").all():
        boxes = sorted(
            (box["y"], box["y"] + box["height"]) for box in (one.bounding_box() for one in chart.locator(".name").all())
        )
        assert all(above[1] <= below[0] + 4 for above, below in pairwise(boxes))
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
