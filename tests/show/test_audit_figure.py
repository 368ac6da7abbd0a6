"""The figures of an audit show its numbers."""

import itertools

import numpy as np
import pytest

import regard
from policy_audit.small_models import HEADS, LAYERS, PROMPT, draw_tokens, make_model, record
from regard import ConfigError
from regard.policies import DuoAttention, Knorm, Oracle
from regard.show.audit_figure import draw_recall_by_position, draw_recall_curves, draw_recall_grids


def test_the_heat_maps_are_the_mean_recall_of_each_layer_and_head():
    found = regard.audit(record(make_model(), draw_tokens()), [Knorm(3), Oracle(3)], prompt=PROMPT)
    picture = draw_recall_grids(found)
    panels = [axes for axes in picture.axes if axes.images]
    assert [axes.get_title() or axes.get_title(loc="left") for axes in panels] == list(found.labels)
    for n, axes in enumerate(panels):
        expected = found.recall[n, ..., PROMPT:].mean((1, 3)).numpy()
        assert expected.shape == (LAYERS, HEADS)
        np.testing.assert_allclose(np.asarray(axes.images[0].get_array()), expected, rtol=1e-12)


def test_the_heat_maps_name_the_layers_that_were_audited():
    found = regard.audit(record(make_model(), draw_tokens()), Knorm(3), prompt=PROMPT, layers=[1])
    axes = draw_recall_grids(found).axes[0]
    assert axes.yaxis.get_major_formatter()(0) == "1"
    assert [axes.xaxis.get_major_formatter()(n) for n in range(HEADS)] == [str(n) for n in range(HEADS)]
    assert axes.yaxis.get_major_formatter()(1) == ""


def test_the_curves_are_the_points_in_order():
    picture = draw_recall_curves({"Knorm": [(0.5, 0.9), (0.1, 0.3)], "Oracle": [(0.1, 0.8)]})
    lines = picture.axes[0].get_lines()
    assert lines[0].get_xydata().tolist() == [[0.1, 0.3], [0.5, 0.9]]
    assert [line.get_label() for line in lines] == ["Knorm", "Oracle"]


@pytest.mark.parametrize("shares", [(0.03, 0.7), (0.001, 1.0), (0.2, 0.5)])
def test_labels_of_shares_do_not_overlap(shares):
    picture = draw_recall_curves({"Oracle": [(share, 0.5) for share in shares]})
    picture.draw_without_rendering()
    axis = picture.axes[0].xaxis
    labels = [*axis.get_ticklabels(), *axis.get_ticklabels(minor=True)]
    boxes = sorted((box.x0, box.x1) for box in (label.get_window_extent() for label in labels if label.get_text()))
    low, high = picture.axes[0].get_xlim()
    assert sum(low <= tick <= high for tick in axis.get_majorticklocs()) >= 2
    assert all(end < start for (_, end), (start, _) in itertools.pairwise(boxes))


def test_the_curves_by_position_are_the_means_of_runs_of_queries():
    found = regard.audit(record(make_model(), draw_tokens()), [Knorm(3), Oracle(3)], prompt=PROMPT)
    lines = draw_recall_by_position(found, bins=4).axes[0].get_lines()
    assert [line.get_label() for line in lines[:2]] == list(found.labels)
    assert lines[0].get_xdata().tolist() == [4.5, 14.5, 24.5, 35]
    assert lines[0].get_ydata()[2] == pytest.approx(float(found.recall[0, ..., 20:30].mean()))
    assert lines[2].get_xdata()[0] == PROMPT - 0.5


def test_policies_with_the_same_label_have_a_curve_each():
    retrieval = [((0, 0), (0, 1), middle, (1, 2)) for middle in ((1, 0), (1, 1))]
    chosen = [DuoAttention(pairs, sinks=1, window=2) for pairs in retrieval]
    found = regard.audit(record(make_model(), draw_tokens()), chosen, prompt=PROMPT)
    lines = draw_recall_by_position(found, bins=4).axes[0].get_lines()
    assert [line.get_label() for line in lines[:2]] == [chosen[0].label, f"{chosen[0].label} #2"]


@pytest.mark.parametrize("curves", [{}, {"Knorm": []}])
def test_no_points_are_refused(curves):
    with pytest.raises(ConfigError, match="at least one policy"):
        draw_recall_curves(curves)
