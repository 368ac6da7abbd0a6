import pytest
import torch

import regard
from regard import ConfigError, PatchGrid, WeightsError
from regard.models.vision_transformer import VisionConfig, VisionTransformer

SMALL = VisionConfig(15, 3, 2, 2, 3, 12, 7)


def make() -> VisionTransformer:
    torch.manual_seed(0)
    return VisionTransformer(SMALL).double().eval()


def test_its_patches_are_known_to_a_recording():
    model = make()
    with torch.no_grad(), regard.record(model) as recording:
        assert model(torch.randn(2, 2, 15, 15).double()).shape == (2, 7)
    # two channels are no image by their number, but the argument is named as one
    assert recording.places == {"blocks": PatchGrid(5, 5, 1, names=("class token",))}
    assert recording.map(0).shape == (2, 3, 26, 26)


def test_it_is_the_same_after_it_was_saved(tmp_path):
    model = make().half().double()  # as it is stored
    model.save(tmp_path)
    images = torch.randn(1, 2, 15, 15).double()
    assert torch.equal(VisionTransformer.load(tmp_path).double()(images), model(images))


@pytest.mark.parametrize(
    ("settings", "says"), [({"patch_size": 5}, "divide"), ({"hidden_size": 50}, "multiple"), ({"classes": 0}, "classes")]
)
def test_sizes_that_do_not_fit_are_refused(settings, says):
    with pytest.raises(ConfigError, match=says):
        VisionConfig(**settings)


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(WeightsError, match=r"settings\.json"):
        VisionTransformer.load(tmp_path)
    make().save(tmp_path)
    (tmp_path / "settings.json").write_text('{"hidden_size": 24}')
    with pytest.raises(WeightsError, match="valid vision transformer"):
        VisionTransformer.load(tmp_path)
