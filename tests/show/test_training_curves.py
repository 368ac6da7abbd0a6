import io

import numpy as np
import pytest

from regard.show import training_curves
from regard.show.figure import FAINT, INKS

ROWS = [{"step": n, "loss_nats": 4 / n**0.5, "rate": 0.1 * n, "gradient_norm": 1.0 + n % 3} for n in range(1, 201)]
for one in ROWS[49::50]:
    one["held_out_nats"] = one["loss_nats"] + 0.3


def head_rows(last, steps=(1, 100, 200)):
    """Rows of heads whose score of each detector ends with those given, (layer, head): score."""
    return [
        {"step": step, "layer": layer, "head": head, "on": on, "kind": "unclear", detector: score * step / steps[-1]}
        for step in steps
        for (layer, head), score in last.items()
        for detector, on in training_curves.DETECTORS
    ]


def render_picture(picture) -> None:
    picture.savefig(io.BytesIO(), format="png")


def test_every_step_is_drawn_and_the_means_of_both_losses():
    loss, rate, norm = training_curves.draw_training_curves(ROWS, "a run").axes
    steps, mean, held_out = loss.lines
    assert steps.get_ydata().tolist() == [row["loss_nats"] for row in ROWS]
    assert mean.get_ydata()[-1] == pytest.approx(np.mean([row["loss_nats"] for row in ROWS[-4:]]))
    assert held_out.get_xydata().tolist() == [[row["step"], row["held_out_nats"]] for row in ROWS[49::50]]
    assert rate.lines[0].get_ydata().tolist() == [row["rate"] for row in ROWS]
    assert norm.lines[0].get_ydata().tolist() == [row["gradient_norm"] for row in ROWS]
    assert [text.get_text() for text in loss.texts] == ["trained on", "held out"]


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 49, 200])
def test_a_run_of_any_length_is_drawn(count):
    render_picture(training_curves.draw_training_curves(ROWS[:count]))


@pytest.mark.slow
def test_a_line_for_each_head_and_a_name_for_those_that_end_highest():
    last = {(0, 0): 0.2, (0, 1): 0.9, (1, 0): 0.1, (1, 1): 0.5, (2, 0): 0.7}
    picture = training_curves.draw_head_formation(head_rows(last))
    assert [axes.get_ylabel() for axes in picture.axes] == ["previous token", "induction", "copying", "first token"]
    for axes in picture.axes:
        assert len(axes.lines) == 5
        assert sorted(line.get_ydata()[-1] for line in axes.lines) == pytest.approx(sorted(last.values()))
        assert [text.get_text() for text in axes.get_legend().get_texts()] == ["0.1", "2.0", "1.1"]
        coloured = [line for line in axes.lines if line.get_color() != FAINT]
        assert [line.get_color() for line in coloured] == list(INKS[:3])
        assert len({line.get_linestyle() for line in coloured}) == 3  # told apart without colour
    render_picture(picture)


def test_the_intervals_of_named_heads_are_bands_and_scores_that_are_not_there_have_no_panel():
    rows = [
        {"step": step, "layer": 0, "head": 0, "on": "repeated", "kind": "unclear", "induction": 0.1 * step}
        | {"induction low": 0.1 * step - 0.05, "induction high": 0.1 * step + 0.05}
        for step in (1, 2, 3)
    ]
    (axes,) = training_curves.draw_head_formation(rows).axes
    assert axes.get_ylabel() == "induction"
    (band,) = axes.collections
    assert sorted({round(float(y), 3) for _, y in band.get_paths()[0].vertices}) == [0.05, 0.15, 0.25, 0.35]


def test_the_step_at_which_a_head_forms_is_the_first_from_which_on_its_interval_clears_the_threshold():
    def rows(detector, *lows):
        return [{"step": 100 * n, f"{detector} low": low} for n, low in enumerate(lows)]

    found = training_curves.find_formation_step
    assert found(rows("induction", 0.1, 0.5, 0.39, 0.41, 0.9), "induction") == 300
    assert found(rows("induction", 0.1, 0.5, 0.4), "induction") is None
    assert found(rows("first token", 0.31, 0.35), "first token") == 0
    assert found(rows("copying", -1.0, 0.1), "copying") == 100
    assert found([{"step": 1, "induction": 0.9}], "induction") is None  # without an interval
    assert found([], "induction") is None


def test_a_named_head_is_shown_with_the_step_at_which_it_forms():
    rows = [
        {"step": step, "layer": 0, "head": 0, "on": "repeated", "kind": "unclear", "induction": low + 0.1}
        | {"induction low": low, "induction high": low + 0.2}
        for step, low in ((1, 0.0), (1500, 0.5), (2000, 0.6))
    ]
    (axes,) = training_curves.draw_head_formation(rows).axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["0.0, step 1,500"]
