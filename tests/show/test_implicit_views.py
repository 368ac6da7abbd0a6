"""Layers without a softmax in the terminal: signed numbers, digits and letters, or two hues, of the matrix of the test."""

import re

import pytest

from regard.show import implicit_views
from regard.show.heat_map import format_entry
from regard.show.terminal_colors import TerminalArea
from show.implicit_recordings import SiluAttention, SoftmaxAttention, pool_signed, record_implicit, record_spread

T, LONG = 11, 307
PLAIN, WIDE, NARROW = (TerminalArea(width, 24, colors) for width, colors in ((80, None), (80, "256"), (40, None)))


@pytest.fixture(scope="module")
def recording():
    return record_implicit(T, SoftmaxAttention, SiluAttention, SiluAttention)


def read(lines):
    return [line.plain for line in lines]


def find_row(lines, number):
    """The cells after the number and the word of a query."""
    return next(line for line in lines if re.match(rf" *{number} a{number}\b", line)).split()[2:]


def test_a_wide_screen_has_every_entry_with_its_sign(recording):
    dense = recording.map(0, kind="implicit").dense()[0, 2]
    lines = read(implicit_views.render_head(recording, (0, 2), PLAIN))
    for query in range(T):
        cells = find_row(lines, query)
        for cell, entry in zip(cells, dense[query].tolist(), strict=True):
            assert cell[0] in "+-"
            assert float(cell) == pytest.approx(entry, abs=max(0.0051, 0.06 * abs(entry)))
    said = " ".join(lines)
    assert lines[0] == "layer 0, head 2: silu attention"
    assert "No softmax: entries are signed; rows need not sum to 1." in said
    assert "the token whose value it multiplies" in said


def test_a_narrow_one_has_digits_above_zero_and_letters_below(recording):
    dense = recording.map(0, kind="implicit").dense()[0, 1]
    lines = read(implicit_views.render_head(recording, (0, 1), NARROW))
    tenths = (10 * dense.abs() / dense.abs().max()).floor().clamp(max=9)
    for query in range(T):
        wanted = [
            ("·123456789", "·abcdefghi")[entry < 0][int(size)] for entry, size in zip(dense[query], tenths[query], strict=True)
        ]
        assert find_row(lines, query) == wanted
    said = " ".join(lines)
    assert "digits above 0, letters below" in said
    assert "entry · less than" in said
    assert max(map(len, lines)) <= 40


def test_colors_have_the_hue_of_the_sign_and_none_near_zero(recording):
    dense = recording.map(0, kind="implicit").dense()[0, 0]
    lines = list(implicit_views.render_head(recording, (0, 0), WIDE))
    blues, browns = {153, 110, 67, 25}, {223, 180, 137, 130}
    for query in range(T):
        line = next(one for one in lines if re.match(rf" *{query} a{query}\b", one.plain))
        styles = [span.style for span in line.spans if hasattr(span.style, "bgcolor") and span.end - span.start == 6]
        colored = iter([style.bgcolor.number for style in styles if style.bgcolor is not None])
        for share in (dense[query] / dense.abs().max()).tolist():
            if abs(share) >= 0.05:
                color = next(colored)
                assert color in ((blues if share > 0 else browns) if round(4 * abs(share)) else {231})
        assert next(colored, None) is None
    assert "blue above 0, brown below" in " ".join(read(lines))


@pytest.mark.parametrize("decades", [None, 4])
def test_a_long_head_shows_the_entry_of_each_cell_that_is_largest_in_size(decades):
    recording = record_spread(LONG) if decades else record_implicit(LONG, SiluAttention, batch=1)
    dense = recording.map(0, kind="implicit").dense()[0, 1]
    lines = read(implicit_views.render_head(recording, (0, 1), PLAIN))
    cells = [line.split(" ", 1)[1] for line in (one.lstrip() for one in lines) if re.match(r"\d+ [\w·]{60,}$", line)]
    pooled = pool_signed(dense, len(cells), len(cells[0]), "max")
    sizes = pooled.abs() / pooled.abs().max()
    if decades:
        sizes = (1 + sizes.log10() / decades).clamp(min=0)
    close = ((10 * sizes) % 1 - 0.5).abs() > 0.4999  # at the edge of a tenth
    for r, line in enumerate(cells):
        for c, cell in enumerate(line):
            wanted = ("·123456789", "·abcdefghi")[bool(pooled[r, c] < 0)][min(int(10 * sizes[r, c]), 9)]
            assert cell == wanted or close[r, c]
    assert ("logarithmic, over four decades" in " ".join(lines)) == bool(decades)


@pytest.mark.parametrize("heads", [[1], [0, 1, 2]])
def test_a_row_lists_the_entries_largest_in_size_with_their_signs(recording, heads):
    row = recording.map(1, kind="implicit").dense()[0, heads, 3].mean(0)
    place = (1, heads[0] if len(heads) == 1 else None)
    lines = read(implicit_views.render_row(recording, place, "a3", PLAIN, False))
    assert lines[0].startswith("what 'a3', token 3, took from each token: layer 1, ")
    order = row.abs().argsort(descending=True).tolist()
    bars = lines[lines.index("") + 1 :]
    assert [bar.split()[1] for bar in bars] == [f"a{key}" for key in order]
    assert [bar.split()[0] for bar in bars] == [format_entry(float(row[key])) for key in order]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.25, "+.25"),
        (-0.998, "-1.0"),
        (1.24, "+1.2"),
        (-99.4, "-99.4"),
        (-99.6, "-100"),
        (3e-4, "+3e-4"),
        (-2e5, "-2e5"),
        (2e-12, "+2e-12"),
    ],
)
def test_an_entry_is_written_in_few_letters(value, text):
    assert format_entry(value) == text
