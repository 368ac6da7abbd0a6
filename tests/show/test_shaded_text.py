import pytest
import torch

from regard.show.color_ramp import shade
from regard.show.color_scale import LinearScale
from regard.show.shaded_text import compute_attention_shares, limit_lines, render_shaded_text
from regard.show.terminal_colors import Heat, TerminalArea
from show.small_recordings import WORDS, record_long_text, record_small_model

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


def test_with_colour_each_word_has_that_of_its_value():
    (line,) = render_shaded_text([" a", " bb"], torch.tensor([0.25, 1.0]), HEAT, window(colours="truecolor"))
    papers = [tuple(span.style.bgcolor.triplet) for span in line.spans if span.style.bgcolor]
    assert papers == [shade(0.25), shade(1.0)]


def test_a_word_that_would_steer_the_terminal_is_spelled_out():
    (line, _) = render_shaded_text(["\x1b[31m", " [bold]"], torch.ones(2), HEAT, window())
    assert line.plain == "\\x1b[31m [bold]"


def test_words_that_were_cut_from_blanks_stand_apart_and_letters_do_not():
    assert next(render_shaded_text(["the", "cat"], torch.ones(2), HEAT, window())).plain == "the cat"
    assert next(render_shaded_text(["C", "B", "A"], torch.ones(3), HEAT, window())).plain == "CBA"


def test_of_a_long_text_the_lines_up_to_the_marked_word_are_shown():
    words = record_long_text().tokens
    lines = list(render_shaded_text(words, torch.ones(700), HEAT, window(colours="256"), marked=400))
    shown = [line.plain for line in limit_lines(lines, False, window(colours="256"), 700, marked=True)]
    assert "[w400]" in shown[-2]
    assert shown[-1] == "a part of 700 tokens; --all shows all"
    assert len(list(limit_lines(lines, True, window(colours="256"), 700))) == len(lines)
