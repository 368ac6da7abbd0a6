import numpy as np
import pytest
import torch
from transformers import DynamicCache

import regard
from regard import ConfigError, OutOfRangeError, PatchGrid
from regard.models.transformers_decoder import find_cache_name
from regard.show.image_overlay import draw_patch_weights
from regard.show.patch_summary import render_patches
from regard.show.patch_weights import compute_patch_weights
from regard.show.terminal_colors import TerminalArea
from show.vision_models import llava, make_llava, make_pixels, make_vit, swin, vit

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
