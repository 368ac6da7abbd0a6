import pytest
import torch

from regard.show.color_scale import LinearScale
from regard.show.shaded_text import compute_attention_shares, render_shaded_text
from regard.show.terminal_colors import Heat, TerminalArea
from show.small_recordings import WORDS, record_small_model

HEAT = Heat(LinearScale(), (0.0, 1.0))


def window(width=80, colours=None):
    return TerminalArea(width, 24, colours)


def test_what_a_word_receives_is_its_column_over_all_heads():
    recording = record_small_model()
    dense = torch.stack([recording.map(layer).dense()[0] for layer in range(2)])
    expected = dense.sum(2).mean((0, 1)) / 17
    torch.testing.assert_close(compute_attention_shares(recording), expected, atol=1e-12, rtol=0)
    assert float(expected.sum()) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("width", [20, 40, 80])
@pytest.mark.parametrize("colours", [None, "256", "truecolor"])
def test_every_word_is_there_once_in_order_and_no_line_is_wider_than_the_screen(width, colours):
    words = [*WORDS, " 漢字"]
    lines = list(render_shaded_text(words, torch.linspace(0, 1, 18), HEAT, window(width, colours)))
    assert all(line.cell_len <= width for line in lines)
    text = "".join(line.plain for line in (lines if colours else lines[::2]))
    assert text.replace(" ", "").replace("↵", "") == "".join(words).replace(" ", "").replace("\n", "")


def test_without_colour_a_digit_stands_under_the_first_letter_of_each_word():
    lines = [
        line.plain
        for line in render_shaded_text([" a", " bb", " ccc", "d"], torch.tensor([0.05, 0.31, 0.99, 0.0]), HEAT, window())
    ]
    assert lines == ["a bb cccd", "· 3  9"]


def test_a_word_that_would_steer_the_terminal_is_spelled_out():
    (line, _) = render_shaded_text(["\x1b[31m", " [bold]"], torch.ones(2), HEAT, window())
    assert line.plain == "\\x1b[31m [bold]"
