import math

import numpy as np
import pytest
import torch
from transformers import DynamicCache

import regard
from regard import ConfigError, OutOfRangeError, PatchGrid, ShapeError
from regard.models.transformers_decoder import find_cache_name
from regard.show.image_overlay import draw_patch_weights
from regard.show.patch_summary import compute_layer_numbers, render_patches
from regard.show.patch_weights import compute_patch_weights, describe_others, require_patches
from regard.show.terminal_colors import TerminalArea
from show.vision_models import llava, make_llava, make_pixels, make_vit, record_family, swin, vit

CLOSE = {"rtol": 1e-12, "atol": 1e-13}  # float64


@pytest.mark.parametrize("head", [None, 1])
@pytest.mark.parametrize("patch", [(0, 0), (4, 6), (2, -1)])
def test_a_patch_of_vit_has_the_weights_of_eager_attention_at_their_patches(head, patch):
    recording, weights = vit()
    found = compute_patch_weights(recording, 1, head, patch)
    own = weights[1][0] if head is None else weights[1][0, [head]]
    row = own.mean(0)[1 + patch[0] * 7 + patch[1] % 7]
    torch.testing.assert_close(found.values, row[1:].view(5, 7), **CLOSE)
    assert found.others[0][0] == "class token"
    assert found.others[0][1] == pytest.approx(float(row[0]), rel=1e-12)
    assert found.patch == (patch[0], patch[1] % 7)


def test_the_class_token_of_the_last_layer_is_shown_by_default():
    recording, weights = vit()
    found = compute_patch_weights(recording)
    torch.testing.assert_close(found.values, weights[1][0].mean(0)[0, 1:].view(5, 7), **CLOSE)
    assert (found.query, found.patch, found.what) == ("class token", None, "layer 1, mean over the heads")


def test_the_rollout_and_the_pull_are_laid_on_the_patches_too():
    recording, _ = vit()
    found = compute_patch_weights(recording, of="rollout", query=(1, 2))
    torch.testing.assert_close(found.values, regard.rollout(recording, [10])[0, 0, 1:].view(5, 7), **CLOSE)
    model = make_vit()
    with regard.record(model, keep="values") as whole:
        number = model(pixel_values=make_pixels(15, 21)).last_hidden_state[0, 0, 3]
    pull = whole.attribute(number)
    found = compute_patch_weights(whole, 0, query=(1, 2), of=pull)
    torch.testing.assert_close(found.values, pull.map(0)[0, :, 10, 1:].sum(0).view(5, 7), **CLOSE)


def test_the_windows_of_swin_are_stitched_and_other_windows_stay_empty():
    recording, weights = swin()
    patches = torch.arange(64).view(8, 8)
    for layer, shift in ((0, 0), (1, 2)):
        moved = patches.roll((-shift, -shift), (0, 1))
        for row, column in ((0, 0), (3, 5), (7, 7)):
            found = compute_patch_weights(recording, layer, None, (row, column)).values
            at = (moved == patches[row, column]).nonzero()[0]
            corner = at // 4 * 4
            inside = moved[corner[0] : corner[0] + 4, corner[1] : corner[1] + 4].flatten()
            own = weights[layer][int(corner[0] // 4 * 2 + corner[1] // 4)]
            expected = torch.full((64,), torch.nan, dtype=torch.float64)
            row_weights = own.mean(0)[int((at - corner) @ torch.tensor([4, 1]))]
            expected[inside] = row_weights  # its mask is a bias of -100, so that no weight is exactly 0
            torch.testing.assert_close(found, expected.view(8, 8), equal_nan=True, **CLOSE)


def test_a_word_of_a_text_looks_at_the_patches_between_the_words():
    recording, weights = llava()
    found = compute_patch_weights(recording, 0, part="language_model")
    row = weights[0][0].mean(0)[12]
    torch.testing.assert_close(found.values, row[2:11].view(3, 3), **CLOSE)
    assert found.query == "“this”, token 12"
    assert len(found.others) == 4
    recording.tokens = [str(n) for n in range(recording.map(0, part="language_model").shape[3])]
    assert compute_patch_weights(recording, 0, part="language_model").query == "“12”, token 12"  # a text of its own number
    word = compute_patch_weights(recording, 0, 2, query=1, part="language_model")
    assert word.values.isnan().all()  # the patches come after this word


def test_many_other_tokens_are_summed_up():
    recording, _ = llava()
    one = compute_patch_weights(recording, 0, part="language_model")
    assert describe_others(one).count(" ") >= 4
    assert compute_patch_weights(recording, 0, part="vision_tower").query == "class token"


@pytest.mark.parametrize(("image", "patch", "first"), [(0, (2, 1), 0), (1, (1, 3), 8)])
def test_each_of_the_images_in_one_sequence_is_shown_by_its_own_middle_patch(image, patch, first):
    recording = record_family("qwen2_vl")  # 4 x 2 and 2 x 6 patches, whose attention is apart
    found = compute_patch_weights(recording, 0, part="visual", image=image)
    assert (found.query, found.patch) == (f"patch {patch[0]},{patch[1]}", patch)
    assert not found.values.isnan().any()
    other = compute_patch_weights(recording, 0, part="visual", image=image, query=8 - first)
    assert (other.query, other.patch) == (f"patch 0,0 of image {1 - image}", None)
    assert other.values.isnan().all()


def test_the_class_token_is_shown_by_default_before_tokens_behind_the_patches_too():
    assert compute_patch_weights(record_family("yolos")).query == "class token"


def test_a_token_that_is_no_recorded_query_is_refused_and_not_taken_for_another():
    model = make_llava().model.language_model
    with torch.no_grad():
        cache = DynamicCache(config=model.config)
        model(torch.tensor([[1, 7, 8, 9, 2, 3]]), **{find_cache_name(model): cache})
        with regard.record(model) as recording:
            model(torch.tensor([[4, 5, 6, 7]]), **{find_cache_name(model): cache})
    recording.places = PatchGrid(1, 3, start=1)
    assert recording.map(0).shape[2:] == (4, 10)
    assert compute_patch_weights(recording, 0, query=7).query == "token 7"
    for places in (PatchGrid(1, 9, start=1), PatchGrid(1, 3, start=1, names=("class token",)), PatchGrid(2, 5, start=0)):
        recording.places = places
        assert compute_patch_weights(recording, 0).values.sum() > 0  # of the last token, not of one that is only a key
    with pytest.raises(OutOfRangeError, match="token 3 was recorded only as a key"):
        compute_patch_weights(recording, 0, query=3)


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"query": (5, 0)}, OutOfRangeError, "row from 0 to 4"),
        ({"query": 36}, OutOfRangeError, "36"),
        ({"query": "cat"}, ConfigError, "the row and column of a patch"),
        ({"of": "sum"}, ConfigError, "rollout"),
        ({"of": "rollout", "head": 1}, ConfigError, "over all heads"),
        ({"image": 1}, ConfigError, "image"),
        ({"row": 1}, OutOfRangeError, "batch"),
    ],
)
def test_a_query_that_does_not_exist_is_refused(settings, error, says):
    with pytest.raises(error, match=says):
        compute_patch_weights(vit()[0], **settings)


def test_places_that_do_not_fit_the_map_are_refused():
    model = make_vit()
    with torch.no_grad(), regard.record(model) as recording:
        model(pixel_values=make_pixels(15, 21))
    recording.places = PatchGrid(6, 7)
    with pytest.raises(ShapeError, match="the axis has 36 tokens"):
        compute_patch_weights(recording, 0)
    recording.places = None
    with pytest.raises(ConfigError, match=r"recording\.places = regard\.PatchGrid"):
        compute_patch_weights(recording)
    with pytest.raises(ConfigError, match=r"recording\.places"):
        require_patches(recording)


@pytest.mark.parametrize("colors", [None, "truecolor"])
def test_a_row_that_is_not_a_number_is_not_shown_as_one_that_sees_nothing(colors):
    model, pixels = make_vit(), make_pixels(15, 21)
    with torch.no_grad():
        next(one for name, one in model.named_parameters() if name.endswith("q_proj.weight"))[0, 0] = torch.nan
        with regard.record(model) as recording:
            model(pixel_values=pixels)
    broken, whole = (compute_patch_weights(one, 0, query=(1, 2)) for one in (recording, vit()[0]))
    assert (broken.undefined, whole.undefined) == (36, 0)
    said = [
        " ".join(" ".join(line.plain for line in render_patches(one, TerminalArea(80, 24, colors))).split())
        for one in (broken, whole)
    ]
    assert ["36 numbers of this query are NaN" in one for one in said] == [True, False]
    assert (
        "36 numbers of this query are NaN" in draw_patch_weights(np.zeros((30, 42, 3), np.uint8), [broken]).axes[1].get_xlabel()
    )


def test_the_numbers_of_a_layer_are_means_over_the_patches_that_are_queries():
    class Layer(torch.nn.Module):
        def forward(self, q, k):
            return regard.attention(q, k, k, offset=6)

    torch.manual_seed(0)
    layer, q, k = Layer(), torch.randn(1, 2, 4, 5, dtype=torch.float64), torch.randn(1, 2, 10, 5, dtype=torch.float64)
    with torch.no_grad(), regard.record(layer) as recording:
        layer(q, k)  # the last 4 of 9 patches, after a token that is none, as after a cache
    recording.places = PatchGrid(3, 3, start=1)
    weights = regard.attend(q, k, k).weights[0]
    patches = weights[..., 1:]
    shares = patches / patches.sum(-1, keepdim=True)
    places = torch.tensor([divmod(patch, 3) for patch in range(9)], dtype=torch.float64)
    found = compute_layer_numbers(recording, 0)
    assert found.others == pytest.approx(float(weights[..., 0].mean()), rel=1e-12)
    assert found.itself == pytest.approx(float(patches.diagonal(5, -2, -1).mean()), rel=1e-12)
    assert found.distance == pytest.approx(float((shares * torch.cdist(places[5:], places)).sum(-1).mean()), rel=1e-12)
    assert found.patches == pytest.approx(float(torch.special.entr(shares).sum(-1).exp().mean()), rel=1e-12)


def test_the_queries_of_pooled_keys_are_no_patches_and_are_numbered_by_themselves():
    torch.manual_seed(0)
    q, k = torch.randn(1, 2, 16, 4, dtype=torch.float64), torch.randn(1, 2, 4, 4, dtype=torch.float64)
    layer = PooledKeys(q, k).eval()
    with torch.no_grad(), regard.record(layer) as recording:
        layer(q)
    recording.places = PatchGrid(2, 2, has_queries=False)
    found = compute_patch_weights(recording, query=3)
    torch.testing.assert_close(found.values, recording.map(0)[0, :, 3].mean(0).view(2, 2), **CLOSE)
    assert (found.query, found.patch) == ("token 3", None)
    with pytest.raises(ConfigError, match="are not patches"):
        compute_patch_weights(recording, query=(0, 0))
    assert math.isnan(compute_layer_numbers(recording, 0).distance)


class PooledKeys(torch.nn.Module):
    """Attention of 16 tokens to 4 keys."""

    def __init__(self, q, k):
        super().__init__()
        self.k = torch.nn.Buffer(k)

    def forward(self, q):
        return torch.nn.functional.scaled_dot_product_attention(q, self.k, self.k)
