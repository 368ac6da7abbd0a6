"""The figures of an audit show its numbers."""

import numpy as np
import pytest

import regard
from policy_audit.small_models import HEADS, LAYERS, PROMPT, draw_tokens, make_model, record
from regard import ConfigError
from regard.policies import Knorm, Oracle
from regard.show.audit_figure import draw_recall_curves, draw_recall_grids


def test_the_heat_maps_are_the_mean_recall_of_each_layer_and_head():
    found = regard.audit(record(make_model(), draw_tokens()), [Knorm(3), Oracle(3)], prompt=PROMPT)
    picture = draw_recall_grids(found)
    panels = [axes for axes in picture.axes if axes.images]
    assert [axes.get_title() or axes.get_title(loc="left") for axes in panels] == list(found.labels)
    for n, axes in enumerate(panels):
        expected = found.recall[n, ..., PROMPT:].mean((1, 3)).numpy()
        assert expected.shape == (LAYERS, HEADS)
        np.testing.assert_allclose(np.asarray(axes.images[0].get_array()), expected, rtol=1e-12)


def test_the_curves_are_the_points_in_order():
    picture = draw_recall_curves({"Knorm": [(0.5, 0.9), (0.1, 0.3)], "Oracle": [(0.1, 0.8)]})
    lines = picture.axes[0].get_lines()
    assert lines[0].get_xydata().tolist() == [[0.1, 0.3], [0.5, 0.9]]
    assert [line.get_label() for line in lines] == ["Knorm", "Oracle"]


@pytest.mark.parametrize("curves", [{}, {"Knorm": []}])
def test_no_points_are_refused(curves):
    with pytest.raises(ConfigError, match="at least one policy"):
        draw_recall_curves(curves)
