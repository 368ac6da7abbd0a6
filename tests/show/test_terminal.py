import io
import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from regard.lectures.example_steps import ExampleStep, StepTable
from regard.lectures.examples import EXAMPLES, build_example
from regard.show import color_ramp
from regard.show.step_descriptions import describe_example
from regard.show.terminal import (
    TableView,
    compute_heat,
    open_console,
    print_step,
    print_wrapped,
    quote_token,
    split_columns,
)

PRINTED = 0.5e-4 + 1e-7  # half a unit of the last of four places, and the float32 that is printed
WORDS = ("Your", "journey", "日本", "שלום", "👩‍👩‍👧", "a\x1b[31mb", "[bold]x[/bold]", "\u202eevil", "\udc80", "x" * 50)


@pytest.mark.parametrize("columns", ["0", "-5", "abc", ""])
def test_columns_that_are_no_width_are_as_if_unset(monkeypatch, columns):
    monkeypatch.delenv("COLUMNS", raising=False)
    unset = open_console(io.StringIO()).width
    monkeypatch.setenv("COLUMNS", columns)
    assert open_console(io.StringIO()).width == unset


@pytest.mark.parametrize("token", [" a", "a ", "  ", " '", ".", " .", " b-c "])
def test_no_line_ends_within_a_quoted_token(token):
    quoted = quote_token(token)
    for width in range(12, 40):
        file = io.StringIO()
        console = Console(file=file, width=width, markup=False, highlight=False)
        print_wrapped(console, Text(f"The next token {quoted} came after {quoted}, 'c' and 'd e'."), hang=2)
        lines = file.getvalue().splitlines()
        assert sum(line.count(quoted) for line in lines) == 2, lines
        assert all(len(line) <= width for line in lines)


def render_step(scene, width, view=None, colours=None):
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=True, color_system=colours, markup=False, highlight=False)
    print_step(console, scene, 1, view or TableView(0, 99))
    return file.getvalue()


def square(words, title=""):
    values = torch.linspace(-1, 1, len(words) ** 2).view(len(words), len(words))
    return ExampleStep("scores", "q kᵀ", "said.", (StepTable(values, tuple(words), tuple(words), "pairs", title),))


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("name", EXAMPLES)
def test_no_line_is_wider_than_the_screen(name, width):
    for scene in describe_example(build_example(name)):
        for line in render_step(scene, width, TableView(0, 12)).splitlines():
            assert cell_len(line) <= width


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_every_number_is_shown_once_under_its_word_whatever_the_width(width):
    words = ("one", "two", "three", "four", "five", "six")
    shown = render_step(square(words), width)
    table = [line for line in shown.splitlines() if line.split() and line.split()[0] in words and "." in line]
    found = {word: [] for word in words}
    for line in table:
        found[line.split()[0]] += [float(number) for number in line.split()[1:]]
    expected = torch.linspace(-1, 1, 36).view(6, 6)
    torch.testing.assert_close(torch.tensor([found[word] for word in words]), expected, atol=PRINTED, rtol=0)


def test_columns_stay_aligned_under_words_of_any_script():
    lines = render_step(square(WORDS), 300).splitlines()[1 : 2 + len(WORDS)]
    ends = [[cell_len(line[: found.end()]) for found in re.finditer(r"-?\d\.\d{4}", line)] for line in lines[1:]]
    assert len(ends) == len(WORDS)
    assert cell_len(lines[0].rstrip()) == ends[0][-1]  # the words above them too
    assert all(row == ends[0] and len(row) == len(WORDS) for row in ends)


def test_words_are_shown_as_written_and_steer_nothing():
    shown = render_step(square(WORDS), 300)
    assert "\x1b" not in shown
    assert "\u202e" not in shown
    assert "a\\x1b[31mb" in shown
    assert "[bold]x[/bold]" in shown
    shown.encode("utf-8")


def test_heat_goes_from_the_least_to_the_greatest_finite_number():
    shares = compute_heat([[0.0, 5.0], [10.0, -math.inf]])
    assert shares[0] == [0, 0.5]
    assert shares[1][0] == 1
    assert math.isnan(shares[1][1])
    assert all(map(math.isnan, compute_heat([[math.nan, math.nan]])[0]))
    assert compute_heat([[3.0, 3.0]]) == [[0, 0]]


def test_the_ramp_is_even_and_of_one_hue_and_its_ink_can_be_read():
    shares = [n / 100 for n in range(101)]
    lights = [color_ramp.luminance(color_ramp.shade(share)) for share in shares]
    assert lights == sorted(lights, reverse=True)
    roots = [light ** (1 / 3) for light in lights]  # near to lightness
    steps = [roots[n] - roots[n + 10] for n in range(0, 100, 10)]
    assert max(steps) < 1.25 * min(steps)
    for share in shares:
        for paper in (color_ramp.shade(share), color_ramp.find_terminal_shade(share)[1]):
            assert color_ramp.contrast(color_ramp.choose_ink(paper), paper) >= 4.5
            assert paper[0] <= paper[1] <= paper[2]  # blue


def test_a_view_shows_its_part_and_counts_it():
    words = tuple(f"w{n}" for n in range(1, 201))
    shown = render_step(square(words), 80, TableView(119, 3, True))
    assert "119 w120" in shown
    assert "w123" not in shown
    assert shown.splitlines()[1].split() == ["119", "120", "121"]
    assert TableView(199, 12).get_range(200, True) == range(199, 200)
    assert TableView(119, 12).get_range(3, False) == range(3)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=30), st.integers(1, 60))
def test_columns_are_cut_into_the_fewest_runs_that_fit(widths, room):
    runs = split_columns(widths, room)
    assert [index for run in runs for index in run] == list(range(len(widths)))
    assert all(len(run) == 1 or sum(widths[index] for index in run) <= room for run in runs)
    greedy, used = 1, 0
    for width in widths:
        if used and used + width > room:
            greedy, used = greedy + 1, 0
        used += width
    assert len(runs) == greedy


def test_panels_stand_side_by_side_where_there_is_room():
    panels = tuple(StepTable(torch.ones(1, 1), ("a",), ("b",), "words", f"head {n}") for n in (1, 2))
    scene = ExampleStep("x", "x", "said.", panels)
    assert re.search(r"head 1 +head 2", render_step(scene, 80))
    assert not re.search(r"head 1 +head 2", render_step(scene, 12))


def test_no_color_and_a_pipe_write_no_escape_codes(monkeypatch):
    class Screen(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)

    def print_to(file):
        print_step(open_console(file, 80), square(("a", "b")), 1, TableView())
        return file.getvalue()

    assert "\x1b[" in print_to(Screen())
    assert "\x1b" not in print_to(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in print_to(Screen())
