"""LeGrad beside its authors' package, on a small vision transformer of open_clip with random weights."""

import pytest
import torch
import torch.nn.functional as F

import regard
from regard.attribution.legrad import collect_scores, get_stream, watch_outputs

package = pytest.importorskip("legrad", reason="legrad_torch, which it compares with, is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

EQUAL = 1e-10  # float64
LAYERS, WIDTH, PIXELS, PATCH = 3, 32, 20, 4


def make_clip():
    from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg

    torch.manual_seed(0)
    vision = CLIPVisionCfg(layers=LAYERS, width=WIDTH, head_width=8, patch_size=PATCH, image_size=PIXELS)
    model = CLIP(24, vision, CLIPTextCfg(layers=1, width=16, heads=2, vocab_size=50, context_length=8))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data = 0.3 * torch.randn_like(parameter)
    return model.double().eval()


def test_the_merged_picture_is_that_of_the_package():
    """Its score of a layer is the similarity of the text with the mean of all tokens, through the last norm and projection."""
    torch.manual_seed(1)
    image = torch.randn(1, 3, PIXELS, PIXELS, dtype=torch.float64)
    text = F.normalize(torch.randn(1, 24, dtype=torch.float64), dim=-1)
    expected = package.LeWrapper(make_clip(), layer_index=0).compute_legrad_clip(text, image)
    model, outputs = make_clip(), {}
    with regard.record(model, keep="values") as recording, watch_outputs(model.visual, outputs):
        model.encode_image(image)
    scores = {}
    for layer in range(LAYERS):
        stream = get_stream(outputs[f"transformer.resblocks.{layer}"])
        features = F.normalize(model.visual.ln_post(stream.mean(1)) @ model.visual.proj, dim=-1)
        scores[layer] = (text @ features.T).sum()
    patches = collect_scores(recording, scores).scores.mean(1)[:, 1:]
    picture = F.interpolate(patches.view(1, 1, PIXELS // PATCH, -1), scale_factor=PATCH, mode="bilinear")
    picture = (picture - picture.min()) / (picture.max() - picture.min())
    assert float((picture - expected).detach().abs().max()) < EQUAL
    assert float(expected.std()) > 0.1
