"""The heat map of a word is laid over the image that was drawn from it."""

import numpy as np
import pytest
import torch

import regard
from observe.token_places.test_diffusion import HEIGHT, WIDTH, WORDS, B, JointModel, UNet
from regard import ConfigError, OutOfRangeError, PatchGrid
from regard.observe import record
from regard.show.word_heat_figure import WHAT, draw_word_heat_map
from show.test_image_overlay import list_images

IMAGE = np.random.default_rng(0).integers(0, 255, (8 * HEIGHT, 8 * WIDTH, 3), np.uint8)
PROMPT = ["<s>", "a", " dog", " in", " snow"]


@torch.no_grad()
def record_steps(model):
    torch.manual_seed(3)
    x, words = torch.randn(B, 7, HEIGHT, WIDTH), torch.randn(B, WORDS, 7)
    with record(model) as recording:
        for _ in range(2):
            x = x - 0.3 * model(x, words)
    return recording


@pytest.fixture(scope="module")
def recording():
    return record_steps(UNet())


def test_each_word_has_its_heat_map_over_the_image(recording):
    recording.tokens = PROMPT
    drawn = draw_word_heat_map(recording, IMAGE, [2, -1], row=0)
    plain, *others = drawn.axes[:3]
    assert plain.get_xlabel() == WHAT
    assert np.array_equal(list_images(plain)[0].get_array(), IMAGE)
    assert [axes.get_title(loc="left") for axes in others] == ["“dog”, word 2", "“snow”, word -1"]
    colors = [list_images(axes)[1] for axes in others]
    for image, word in zip(colors, (2, -1), strict=True):
        expected = regard.word_heat_map(recording, word, (8 * HEIGHT, 8 * WIDTH), row=0)
        assert image.get_extent() == [0, 8 * WIDTH, 8 * HEIGHT, 0]
        np.testing.assert_array_equal(image.get_array().filled(np.nan), expected.numpy())
    largest = max(image.get_array().max() for image in colors)
    assert {image.get_clim() for image in colors} == {(0, largest)}


@pytest.mark.parametrize("named", ["the prompt", "the sequence"])
def test_words_beside_patches_in_one_sequence_are_named(named):
    recording = record_steps(JointModel(words_first=False))
    recording.places = {"joint": PatchGrid(HEIGHT, WIDTH, start=0), "": PatchGrid(HEIGHT, WIDTH)}
    recording.tokens = PROMPT if named == "the prompt" else ["·"] * HEIGHT * WIDTH + PROMPT
    assert draw_word_heat_map(recording, IMAGE, 4).axes[1].get_title(loc="left") == "“snow”, word 4"


def test_wrong_words_are_refused(recording):
    with pytest.raises(ConfigError, match="got none"):
        draw_word_heat_map(recording, IMAGE, [])
    with pytest.raises(OutOfRangeError, match="word"):
        draw_word_heat_map(recording, IMAGE, WORDS)
    with pytest.raises(regard.ShapeError, match="proportions"):
        draw_word_heat_map(recording, IMAGE[:, :16], 2)
