import numpy as np
import pytest
import torch
from PIL import Image

from regard import ConfigError, DataError
from regard.show.image_input import load_image

PIXELS = np.arange(5 * 7 * 3, dtype=np.uint8).reshape(5, 7, 3)


def test_every_form_of_an_image_gives_its_pixels(tmp_path):
    Image.fromarray(PIXELS).save(tmp_path / "one.png")
    tensor = torch.tensor(PIXELS).movedim(-1, 0)
    for form in (tmp_path / "one.png", str(tmp_path / "one.png"), Image.fromarray(PIXELS), PIXELS, tensor, tensor[None]):
        assert (load_image(form) == PIXELS).all()
    assert (load_image(PIXELS / 255) == PIXELS).all()
    assert (load_image(tensor / 255) == PIXELS).all()


def test_an_image_without_colors_is_grey():
    grey = PIXELS[..., 0]
    for form in (grey, grey[..., None], torch.tensor(grey)[None], Image.fromarray(grey)):
        assert (load_image(form) == grey[..., None]).all()


@pytest.mark.parametrize("kind", [np.uint16, np.int32, np.float32])
def test_a_grey_picture_of_more_than_8_bits_is_scaled_and_not_cut_off(kind, tmp_path):
    numbers = np.linspace(0, 65535, 35).reshape(5, 7).astype(np.uint16)
    picture = Image.fromarray(numbers.astype(kind) / np.float32(65535) if kind is np.float32 else numbers.astype(kind))
    picture.save(tmp_path / "grey.tiff")
    expected = np.rint(numbers / 257).astype(int)
    for image in (picture, tmp_path / "grey.tiff"):
        found = load_image(image)
        assert found.shape == (5, 7, 3)
        assert np.abs(found[..., 1].astype(int) - expected).max() <= 1


@pytest.mark.parametrize("numbers", [[[0, 1000], [3000, 4095]], [[700, 700]], [[0, 65535]], [[0, 200]], [[1, 1]]])
def test_integers_give_the_same_picture_in_every_form(numbers):
    words = np.array(numbers, np.uint16)
    expected = words if words.max() <= 255 else np.rint(words / 257)
    for form in (words, Image.fromarray(words), Image.fromarray(words.astype(np.int32)), words.astype(">u2")):
        assert np.array_equal(load_image(form)[..., 0], expected)


@pytest.mark.parametrize(
    "image", [7, None, {"a": 1}, np.zeros(3), np.zeros((2, 3, 5)), torch.zeros(2, 3, 4, 5), np.zeros((0, 2))]
)
def test_what_is_no_image_is_refused(image):
    with pytest.raises(ConfigError, match="a PIL image"):
        load_image(image)


def test_a_file_that_is_no_image_says_so(tmp_path):
    (tmp_path / "a.png").write_text("not an image")
    with pytest.raises(DataError, match="could not be read as an image"):
        load_image(tmp_path / "a.png")
    with pytest.raises(DataError, match="is not a file"):
        load_image(tmp_path / "none.png")


def test_a_file_without_pillow_says_what_to_install(monkeypatch, tmp_path):
    import regard.show.image_input as module

    def refuse(name):
        raise ImportError(name)

    monkeypatch.setattr(module, "import_module", refuse)
    with pytest.raises(ConfigError, match="pip install pillow"):
        load_image(tmp_path / "a.png")
