"""Who sees whom as a picture: what is seen, what differs by colour and by sign, and never more than can be read."""

import base64
import re
import xml.etree.ElementTree as ET

import pytest
import torch

from regard.examination.report import Visibility
from regard.show import visibility_picture as drawn
from regard.show.color_ramp import contrast
from show.elements import EVIL, Page

SVG = "{http://www.w3.org/2000/svg}"


def make_visibility(found, expected=None, words=None):
    """A sight of as many tokens as found has keys, every row of which was measured."""
    found = torch.tensor(found)
    expected = torch.ones_like(found).tril(found.shape[1] - found.shape[0]) if expected is None else torch.tensor(expected)
    words = words or tuple(f"w{n}" for n in range(found.shape[1]))
    return Visibility(expected.bool(), found.bool(), found.double(), words)


def tree(sight):
    (image,) = Page(drawn.render_picture(sight)).all("img")
    return ET.fromstring(base64.b64decode(image["src"].removeprefix("data:image/svg+xml;base64,")))


def cells(sight, colour):
    """The cells of a colour, (row, column), in all three squares."""
    paths = [one.get("d") for one in tree(sight).iter(f"{SVG}path") if one.get("fill") == colour]
    runs = [map(int, run) for path in paths for run in re.findall(r"M(\d+) (\d+)h(\d+)v1", path)]
    return {(row, start + n) for start, row, length in runs for n in range(length)}


def signs(sight, sign):
    """How often a sign stands in the picture, each with a place of its own."""
    (found,) = [one for one in tree(sight).iter(f"{SVG}text") if set(one.text) == {sign}] or [None]
    if found is None:
        return 0
    assert len(found.text) == len(found.get("x").split()) == len(found.get("y").split())
    return len(set(zip(found.get("x").split(), found.get("y").split(), strict=True)))


LEAK = [[1, 0, 1, 1], [1, 1, 0, 0], [0, 1, 1, 0], [1, 1, 1, 1]]  # query 0 sees keys 2 and 3, query 2 does not see key 0


def test_what_differs_has_its_colour_and_its_sign():
    sight = make_visibility(LEAK)
    assert cells(sight, drawn.EXTRA_COLOR) == {(0, 2), (0, 3)}
    assert cells(sight, drawn.MISSING_COLOR) == {(2, 0)}
    assert (signs(sight, "+"), signs(sight, "−"), signs(sight, "?")) == (2, 1, 0)
    assert drawn.describe_picture(sight).endswith("+ sees what it may not; − does not see what it may.")
    assert contrast(*(tuple(bytes.fromhex(colour[1:])) for colour in (drawn.EXTRA_COLOR, "#ffffff"))) >= 4.5
    assert contrast(*(tuple(bytes.fromhex(colour[1:])) for colour in (drawn.MISSING_COLOR, "#ffffff"))) >= 4.5


def test_a_row_that_was_not_measured_says_so_and_differs_in_nothing():
    sight = make_visibility(LEAK)
    sight.strength[0] = torch.nan
    assert cells(sight, drawn.EXTRA_COLOR) == set()
    assert sum(one.text == "????" for one in tree(sight).iter(f"{SVG}text")) == 2  # in found and in difference
    assert "? was not measured" in drawn.describe_picture(sight)


def test_words_stand_beside_rows_and_over_columns_whatever_they_hold():
    sight = make_visibility(
        [[1, 1, 1, 0], [1, 1, 1, 1]], words=(EVIL[1], "&amp;", "c", "d")
    )  # the queries are the last two tokens
    said = [one.text for one in tree(sight).iter(f"{SVG}text")]
    assert said[:2] == ["c", "d"]
    assert said[2:7] == ["expected", "<script>said=…", "&amp;", "c", "d"]


@pytest.mark.parametrize("at", [(0, 0), (60, 70), (99, 99)])
def test_of_a_long_text_the_part_about_the_first_difference_is_drawn(at):
    expected = torch.ones(100, 100).tril()
    found = expected.clone()
    found[at] = 1 - found[at]
    sight = make_visibility(found.tolist(), expected.tolist(), words=tuple(map(str, range(100))))
    part = drawn.crop_visibility(sight)
    assert part.difference.shape == (drawn.MAX_TOKENS, drawn.MAX_TOKENS)
    (place,) = part.difference.nonzero().tolist()
    assert (part.rows[place[0]], part.columns[place[1]]) == tuple(map(str, at))
    assert f"{drawn.MAX_TOKENS} of 100 queries and {drawn.MAX_TOKENS} of 100 keys are drawn." in drawn.describe_picture(sight)
    assert len(drawn.render_picture(sight)) < 30_000
