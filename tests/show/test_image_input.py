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


def test_the_numbers_of_a_models_input_are_stretched():
    found = load_image(torch.tensor([[[-2.0, 0.0], [1.0, 2.0]]]))
    assert found[..., 0].tolist() == [[0, 128], [191, 255]]


@pytest.mark.parametrize(
    "image", [7, None, {"a": 1}, np.zeros(3), np.zeros((2, 3, 5)), torch.zeros(2, 3, 4, 5), np.zeros((0, 2))]
)
def test_what_is_no_image_is_refused(image):
    with pytest.raises(ConfigError, match="a PIL image"):
        load_image(image)


def test_numbers_that_are_not_finite_are_refused():
    with pytest.raises(ConfigError, match="finite"):
        load_image(np.array([[0.5, np.nan]]))


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
