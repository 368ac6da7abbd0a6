from dataclasses import replace

import numpy as np
import pytest
import torch
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle

import regard
from regard import ConfigError
from regard.show.image_overlay import draw_image_overlay
from regard.show.patch_weights import compute_patch_weights
from show.vision_models import make_pixels, make_vit, vit

IMAGE = np.full((30, 42, 3), 90, np.uint8)


def list_images(axes):
    return [one for one in axes.get_children() if isinstance(one, AxesImage)]


def test_the_weights_lie_on_the_patches_of_the_image():
    recording, _ = vit()
    drawn = draw_image_overlay(recording, IMAGE, 1, 2, query=(3, 4))
    plain, over = drawn.axes[:2]
    picture, colors = list_images(over)
    assert picture.get_extent() == colors.get_extent() == [0, 42, 30, 0]
    assert np.array_equal(colors.get_array().filled(np.nan), compute_patch_weights(recording, 1, 2, (3, 4)).values.numpy())
    for axes in (plain, over):
        (mark,) = [one for one in axes.patches if isinstance(one, Rectangle)]
        assert (mark.get_x(), mark.get_y(), mark.get_width(), mark.get_height()) == (24, 18, 6, 6)
    assert over.get_title(loc="left") == "layer 1, head 2: patch 3,4"
    assert "class token" in over.get_xlabel()


def test_edges_that_the_model_cut_off_stay_uncolored_at_any_size_of_the_image():
    recording = vit()[0]
    places = {name: replace(grid, extent=(0, 0, 15 / 17, 21 / 23)) for name, grid in recording.places.items()}
    drawn = draw_image_overlay(replace(recording, places=places), np.full((34, 46, 3), 90, np.uint8), 1, 2, query=(3, 4))
    over = drawn.axes[1]
    picture, colors = list_images(over)
    assert picture.get_extent() == [0, 46, 34, 0]
    assert np.allclose(colors.get_extent(), [0, 42, 30, 0], atol=1e-3)
    assert (over.get_xlim(), over.get_ylim()) == ((0, 46), (34, 0))
    (mark,) = [one for one in over.patches if isinstance(one, Rectangle)]
    assert np.allclose((mark.get_x(), mark.get_y(), mark.get_width(), mark.get_height()), (24, 18, 6, 6), atol=1e-3)
    unknown = {name: replace(grid, extent=None) for name, grid in places.items()}
    with pytest.raises(ConfigError, match=r"where the 5 x 7 patches lie .* extent="):
        draw_image_overlay(replace(recording, places=unknown), IMAGE, 1, 2)


def test_the_pull_has_a_scale_with_a_sign():
    model = make_vit()
    with regard.record(model, keep="values") as recording:
        number = model(pixel_values=make_pixels(15, 21)).last_hidden_state[0, 0, 3]
    drawn = draw_image_overlay(recording, IMAGE, 0, of=recording.attribute(number))
    low, high = list_images(drawn.axes[1])[1].get_clim()
    assert low == -high < 0


def test_a_list_of_queries_has_a_panel_for_each():
    queries = [(3, 4), 0, (0, 6)]
    drawn = draw_image_overlay(vit()[0], IMAGE, 1, 2, query=queries)
    assert drawn.axes[0].get_xlabel() == "layer 1, head 2"
    assert not drawn.axes[0].patches
    assert [axes.get_title(loc="left") for axes in drawn.axes[1:4]] == ["patch 3,4", "class token", "patch 0,6"]
    for axes, query in zip(drawn.axes[1:4], queries, strict=True):
        expected = compute_patch_weights(vit()[0], 1, 2, query).values.numpy()
        assert np.array_equal(list_images(axes)[1].get_array().filled(np.nan), expected)
    with pytest.raises(ConfigError, match="an empty list"):
        draw_image_overlay(vit()[0], IMAGE, query=[])


def test_the_figure_is_saved_as_vectors_and_in_a_notebook(tmp_path):
    drawn = draw_image_overlay(vit()[0], torch.rand(3, 15, 21))
    drawn.savefig(tmp_path / "one.svg")
    assert drawn._repr_png_()[1]["width"] > 300
