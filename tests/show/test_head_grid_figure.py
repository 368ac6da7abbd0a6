import math

import numpy as np
import pytest
import torch

from regard import ShapeError
from regard.show import color_ramp
from regard.show.head_grid_figure import draw_head_grid
from show.pictures import assert_readable, vectors

GRID = torch.tensor([[0.5, -0.25, 0.0], [math.nan, -1.0, 0.125]], dtype=torch.float64)
BLINDNESS = {  # linear RGB as it is seen without one of the cones: Machado, Oliveira and Fernandes 2009, severity 1
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
TO_CONES = [[0.4122215, 0.5363325, 0.0514460], [0.2119035, 0.6806995, 0.1073970], [0.0883025, 0.2817188, 0.6299787]]
TO_OKLAB = [[0.2104543, 0.7936178, -0.0040720], [1.9779985, -2.4285922, 0.4505937], [0.0259040, 0.7827718, -0.8086758]]


def convert_to_oklab(linear):
    """OKLab of linear RGB (Ottosson 2020)."""
    return np.array(TO_OKLAB) @ np.cbrt(np.array(TO_CONES) @ np.clip(linear, 0, 1))


def linearize(color):
    return np.array([color_ramp.linearize_channel(part / 255) for part in color])


def get_mesh(picture):
    return picture.axes[0].collections[0]


def get_legend(picture):
    return {text.get_text(): mark.get_facecolor() for text, mark in zip(*read_legend(picture), strict=True)}


def read_legend(picture):
    (legend,) = picture.legends
    return legend.get_texts(), legend.get_patches()


def test_blue_is_above_zero_brown_below_and_equal_sizes_are_equally_strong():
    mesh = get_mesh(draw_head_grid(GRID))
    assert mesh.get_clim() == (-1, 1)
    for value, share in ((0.5, 0.5), (-0.25, -0.25), (0.0, 0.0), (-1.0, -1.0)):
        found = mesh.to_rgba(value)[:3]
        np.testing.assert_allclose(found, np.array(color_ramp.shade_signed(share)) / 255, rtol=0, atol=1 / 128)
    assert color_ramp.shade_signed(0) == color_ramp.PAPER
    assert ["#{:02x}{:02x}{:02x}".format(*color_ramp.shade_signed(end)) for end in (1, -1)] == ["#2166ac", "#b35806"]


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
@pytest.mark.parametrize("name", [*BLINDNESS, "none"])
def test_the_signs_differ_for_color_blind_readers(name, share):
    seen = BLINDNESS.get(name, np.eye(3))
    one, other = (convert_to_oklab(seen @ linearize(color_ramp.shade_signed(sign * share))) for sign in (1, -1))
    assert np.linalg.norm(one - other) > 0.2 * share  # 0.02 is just noticeable


@pytest.mark.parametrize("sign", [1, -1])
def test_lightness_falls_in_even_steps_from_zero(sign):
    shares = np.linspace(0, 1, 5)
    lightness = [convert_to_oklab(linearize(color_ramp.shade_signed(sign * share)))[0] for share in shares]
    steps = -np.diff(lightness)
    assert steps.min() > 0.8 * steps.max()


def test_each_cell_has_its_number_and_the_legend_says_what_the_colors_mean():
    picture = draw_head_grid(GRID)
    written = {text.get_position(): text.get_text() for text in picture.axes[0].texts}
    places = {(head, layer) for layer in range(2) for head in range(3)} - {(0, 1)}
    assert written == {(x + 0.5, y + 0.5): f"{GRID[y, x]:.2f}".replace("-", "−") for x, y in places}
    legend = get_legend(picture)
    assert list(legend) == ["raises", "lowers", "not measured"]
    assert [tuple(round(255 * part) for part in legend[word][:3]) for word in ("raises", "lowers")] == [
        color_ramp.RAISES,
        color_ramp.LOWERS,
    ]
    assert picture.axes[0].get_facecolor() == legend["not measured"]
    assert bool(get_mesh(picture).get_array().mask[1, 0])
    words = ("rises without it", "falls without it")
    assert list(get_legend(draw_head_grid(GRID.nan_to_num(), signs=words))) == list(words)


def test_layers_are_rows_from_above_and_heads_columns():
    axes = draw_head_grid(GRID).axes[0]
    assert (axes.get_ylabel(), axes.get_xlabel()) == ("layer", "head")
    assert axes.yaxis_inverted()
    assert [label.get_text() for label in axes.get_yticklabels()] == ["0", "1"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0", "1", "2"]


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "heads"), [(1, 1), (2, 3), (12, 12), (30, 9), (80, 64)])
def test_its_words_can_be_read_however_many_heads_there_are(layers, heads):
    grid = torch.linspace(-3, 3, layers * heads).view(layers, heads)
    grid[0, 0] = math.nan
    picture = draw_head_grid(grid, title="a title of some length", signs=("rises without it", "falls without it"))
    assert_readable(picture)
    assert vectors(picture).count('<g id="text_') >= 6


@pytest.mark.parametrize("wrong", [torch.ones(3), torch.ones(2, 3, 2), torch.ones(0, 3)])
def test_what_is_no_grid_is_refused(wrong):
    with pytest.raises(ShapeError, match="layers, heads"):
        draw_head_grid(wrong)
