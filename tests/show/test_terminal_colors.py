import io

import pytest
from rich.console import Console

from regard.show.color_scale import LinearScale, Log
from regard.show.terminal_colors import PIPE_LINES, Heat, measure_window


@pytest.mark.parametrize("room", [12, 20, 33, 73])
@pytest.mark.parametrize("ends", [(1e-4, 1.0), (0.00123, 0.0456), (0.0, 0.98)])
def test_the_legend_keeps_to_its_room_and_has_both_ends(room, ends):
    scale = LinearScale() if ends[0] == 0 else Log()
    said = Heat(scale, ends).render_legend("truecolor", max(room, 18))
    assert said.cell_len <= max(room, 18)
    numbers = [float(part) for part in said.plain.split()]
    assert numbers[0] == pytest.approx(ends[0], rel=0.05)  # two digits: half of the last one of 10
    assert numbers[-1] == pytest.approx(ends[1], rel=0.05)
    assert numbers == sorted(numbers)


def test_a_pipe_has_lines_enough_and_no_colour_and_a_terminal_its_own():
    piped = measure_window(Console(file=io.StringIO(), width=70))
    assert (piped.width, piped.colors) == (70, None)
    assert piped.lines > PIPE_LINES - 10
    screen = measure_window(Console(file=io.StringIO(), width=70, height=30, force_terminal=True, color_system="256"))
    assert screen.colors == "256"
    assert 20 <= screen.lines < 30
