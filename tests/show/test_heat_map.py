import re

import pytest
import torch

from regard import AttentionMap, Causal
from regard.show.color_ramp import shade
from regard.show.heat_map import LOWER, UPPER, render_heat_map
from regard.show.terminal_colors import TerminalArea
from show.small_recordings import WORDS, record_long_text, record_small_model


def draw_map(recording, layer, head, width, lines, colours):
    m = recording.map(layer, head)
    words = recording.tokens
    return list(render_heat_map(m, words, "title", TerminalArea(width, lines, colours)))


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("lines", [4, 18, 60])
@pytest.mark.parametrize("colours", [None, "256", "truecolor"])
@pytest.mark.parametrize("make", [record_small_model, record_long_text])
def test_the_picture_fits_the_window(make, width, lines, colours):
    found = draw_map(make(), 0, 1, width, lines, colours)
    assert all(line.cell_len <= width for line in found)
    assert len(found) <= lines + 6


def test_every_weight_of_a_short_text_is_written_beside_its_word():
    found = draw_map(record_small_model(), 1, 2, 100, 20, None)
    weights = record_small_model().map(1, 2).dense()[0, 0]
    for n, line in enumerate(found[2:19]):
        number, rest = line.plain[:2], line.plain[2:]
        assert int(number) == n
        assert WORDS[n].strip().replace("\n", "") in rest
        said = [float(one) for one in re.findall(r"(?:1)?\.\d+", rest)]
        expected = [float(weight) for weight in weights[n, : n + 1] if weight]
        assert said == pytest.approx(expected, abs=0.00501)  # two places


@pytest.mark.parametrize("width", [40, 60, 100])
def test_where_there_is_room_each_weight_has_a_cell_of_its_own_colour(width):
    m = record_small_model().map(1, 1)
    dense, top = m.dense()[0, 0], float(m.dense().max())
    for n, line in enumerate(list(render_heat_map(m, WORDS, "title", TerminalArea(width, 20, "truecolor")))[2:19]):
        papers = [tuple(span.style.bgcolor.triplet) for span in line.spans if getattr(span.style, "bgcolor", None)]
        assert papers == [shade(float(dense[n, key]) / top) for key in range(n + 1)]
        assert all(span.end <= len(line.plain) for span in line.spans)


def test_where_a_query_may_not_see_nothing_is_drawn():
    found = draw_map(record_small_model(), 0, 0, 40, 10, "truecolor")
    first = found[2].plain.rstrip()
    assert first.count(UPPER) == 1
    assert first.count(LOWER) == 1  # of the second query on itself


def test_a_long_text_is_drawn_without_the_matrix():
    q, k = torch.randn(2, 1, 1, 20_011, 2, generator=torch.Generator().manual_seed(0)).unbind()
    found = list(
        render_heat_map(
            AttentionMap(q, k, Causal()), [str(n) for n in range(20_011)], "title", TerminalArea(80, 18, "truecolor")
        )
    )
    assert found[2].plain.lstrip().startswith("0")
