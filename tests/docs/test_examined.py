"""The tables of docs/examine.md, by the command that writes them."""

import re

from docs import examined, public
from examination import wrong
from regard.examination import Report

PAGE = examined.PAGE.read_text(encoding="utf-8")


def test_every_layer_of_the_collections_is_on_the_page():
    """Where it is not: python -m docs.examined."""
    wrongs = re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)
    assert wrongs == [one.name for one in wrong.WRONG]
    rights = re.findall(r"^- \*\*(.+)\*\*, (\d+), nothing found: (.+)\.$", PAGE, re.MULTILINE)
    collected = {sort: list(some()) for sort, some in examined.RIGHT.items()}
    assert rights == [(sort, str(len(some)), "; ".join(map(examined.describe_layer, some))) for sort, some in collected.items()]


def test_every_public_layer_is_on_the_page_with_its_version():
    rows = re.findall(r"^\| ([a-z\d-]+) \d[\w.+]* \| (.+?) \| ", PAGE, re.MULTILINE)
    assert list(dict.fromkeys(rows)) == [(one.package, one.says) for one in public.PUBLIC]


def test_a_formula_that_was_identified_is_reported_with_how_well_it_fits():
    told = "there is no softmax. The outputs equal (q kᵀ / √6) v with 4 heads computed this way to within 5e-16; the rest"
    assert examined.shorten(told) == "there is no softmax (fits to 5e-16)"
    assert examined.shorten("word " * 99).endswith("word …")
    assert len(examined.shorten("word " * 99)) <= examined.BRIEF + 2


def test_the_threads_of_a_layer_are_those_above_its_code():
    assert examined.link_threads(wrong.masks.FillNotKept) == (
        "[flamingo-pytorch#10](https://github.com/lucidrains/flamingo-pytorch/issues/10), "
        "[ParlAI#3068](https://github.com/facebookresearch/ParlAI/pull/3068)"
    )


def test_a_clean_report_tells_how_much_was_checked():
    assert examined.summarize_report(Report("layer", "Causal()")) == "0 things checked"
