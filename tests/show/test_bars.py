import re

import pytest
import torch

from regard.show.bars import format_bar, render_bars
from regard.show.terminal_colors import Window
from show.recorded import WORDS

ROW = torch.tensor([0.5, 0.0, 0.3, 0.1, 0.06, 0.04] + [0.0] * 11)


def test_the_largest_weights_come_first_each_with_its_word_its_place_and_how_far_back():
    lines = [line.plain for line in render_bars(ROW, WORDS, 5, Window(80, 24, None))]
    assert [float(line[:5]) for line in lines] == [0.5, 0.3, 0.1, 0.06, 0.04]
    assert re.match(r"0\.500  The +0, 5 back +#+$", lines[0])
    assert re.match(r"0\.300  saw +2, 3 back +#+$", lines[1])
    assert "5, itself" in lines[-1]


def test_with_colour_the_words_before_it_are_shown_too_and_only_the_word_is_bold():
    line = list(render_bars(ROW, WORDS, 5, Window(80, 24, "256")))[1]
    assert "  The cat saw  " in line.plain
    assert [line.plain[span.start : span.end] for span in line.spans if span.style == "bold"] == ["saw"]


def test_what_is_left_out_is_summed_so_that_the_whole_row_is_described():
    *shown, rest = [line.plain for line in render_bars(ROW, WORDS, 5, Window(80, 24, None), most=2)]
    assert rest == "0.200  on 3 others"
    assert len(shown) == 2


def test_of_a_row_beside_a_sink_only_what_was_given_is_described():
    *_, rest = [line.plain for line in render_bars(ROW / 2, WORDS, 5, Window(80, 24, None), most=2)]
    assert rest == "0.100  on 3 others"


@pytest.mark.parametrize("width", [20, 40, 80, 200])
@pytest.mark.parametrize("colours", [None, "256"])
def test_bars_are_as_long_as_their_weights_and_keep_to_the_screen(width, colours):
    lines = list(render_bars(ROW, WORDS, 5, Window(width, 24, colours)))
    assert all(line.cell_len <= width for line in lines)
    longest = [line.plain.count("#" if colours is None else "█") for line in lines]
    assert longest == sorted(longest, reverse=True)
    if width >= 40:
        assert longest[1] == pytest.approx(0.6 * longest[0], abs=1)


def test_a_bar_is_exact_to_an_eighth_of_a_cell():
    assert format_bar(0.5, 9, "256") == "████▌"
    assert format_bar(1.0, 3, "256") == "███"
    assert format_bar(0.0001, 3, "256") == "▏"
