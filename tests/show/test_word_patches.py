"""The table of what words look at in an image fits the window, and its numbers are whole."""

import pytest
import torch

from regard import PatchGrid
from regard.show.patch_weights import PatchWeights
from regard.show.terminal_colors import TerminalArea
from regard.show.word_patches import render_words


@pytest.mark.parametrize(("side", "number"), [(6, 12), (24, 99), (24, 1234), (100, 99998)])
def test_the_last_digit_of_a_weight_is_shown_at_40_columns(side, number):
    weights = torch.full((side, side), 0.1 / side**2)
    weights[-1, -1] = 0.0123
    shown = [
        PatchWeights(PatchGrid(side, side), weights, (), f"“{word}”, token {number + n}", None, "layer 31")
        for n, word in enumerate(["a", "photograph"])
    ]
    *_, titles, first, second = map(str, render_words(shown, TerminalArea(40, 24, None)))
    for n, line in enumerate((first, second)):
        assert len(line) <= 40
        assert line.split()[0] == str(number + n)
        assert line.endswith(f"patch {side - 1},{side - 1}   0.012")
    assert "“a”" in first
    assert len({len(line) for line in (titles, first, second)}) == 1
