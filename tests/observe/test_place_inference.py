"""Places that record finds by itself: a patch whose pixels change moves the keys at its token, and no others."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import (
    LlavaConfig,
    LlavaForConditionalGeneration,
    SamConfig,
    SamModel,
    SamVisionConfig,
    SamVisionModel,
    SwinConfig,
    SwinModel,
)

from observe.families import FAMILIES
from regard import AudioFrames, PatchGrid, record

PATCH = 4  # pixels, in the images of the families

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
WORDED = {**SMALL, "vocab_size": 60, "num_key_value_heads": 2, "max_position_embeddings": 64, "head_dim": 8}
SPEECH = {"layers": 2, "attention_heads": 2, "ffn_dim": 8}
SIGLIP = {**SMALL, "image_size": 16, "patch_size": 2}


def build(name):
    family = next(family for family in FAMILIES if family.name == name)
    model = family.build(torch.float64)
    return model, family.feed(model)


def run(model, given, **settings):
    with torch.no_grad(), record(model, **settings) as recording:
        model(**given)
    return recording


def change_patch(pixels, row, column, size=PATCH):
    """The images with other pixels in one patch."""
    changed = pixels.clone()
    changed[..., row * size : (row + 1) * size, column * size : (column + 1) * size] += 1
    return changed


def find_changed_keys(before, after, name):
    """The batch rows and tokens of the keys of a layer that differ."""
    one, other = (recording[name][0].map.planes.request.k for recording in (before, after))
    return {tuple(place) for place in (one != other).any(3).any(1).nonzero().tolist()}


@pytest.mark.parametrize(
    ("name", "layer", "start"),
    [
        ("vit", 0, 1),
        ("deit", 0, 2),
        ("dinov2-registers", 0, 5),
        ("dinov3", 0, 1),
        ("siglip vision", 0, 0),
        ("yolos", 0, 1),
        ("clip", 0, 1),
    ],
)
def test_the_token_of_a_patch_is_the_one_whose_key_moves_with_its_pixels(name, layer, start):
    model, given = build(name)
    before = run(model, given)
    part = "vision_model" if name == "clip" else None
    (grid,) = before.axis_places(layer, part=part)[1]
    assert (grid.rows, grid.columns, grid.start) == (3, 3, start)
    path = before.layers(part=part)[layer]
    keys = before.map(layer, part=part).shape[3]
    for row, column in ((0, 0), (1, 2), (2, 1)):
        after = run(model, {**given, "pixel_values": change_patch(given["pixel_values"], row, column)})
        _, token = grid.find_token(row, column, keys)
        assert find_changed_keys(before, after, path) == {(image, token) for image in range(len(given["pixel_values"]))}


def test_the_tokens_before_the_patches_are_named():
    for name, names in (("deit", ["class token", "distillation token"]), ("dinov2-registers", ["class token", "register 0"])):
        recording = run(*build(name))
        (grid,) = recording.axis_places(0)[1]
        assert grid.name_tokens(grid.start + 9)[: len(names)] == names


def test_the_words_of_a_model_of_images_and_text_are_no_patches():
    model, given = build("clip")
    recording = run(model, given)
    assert recording.axis_places(0, part="text_model") == ([], [])


def test_another_size_of_image_is_another_grid():
    model, _ = build("vit")
    with torch.no_grad(), record(model) as recording:
        model(torch.randn(2, 3, 20, 16, dtype=torch.float64), interpolate_pos_encoding=True)
    assert recording.places == {"layers": PatchGrid(5, 4, 1, names=("class token",))}


def test_a_model_of_ones_own_needs_no_config():
    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.cut = nn.Conv2d(1, 8, 3, 3)
            self.attend = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, picture):
            x = self.cut(picture).flatten(2).transpose(1, 2)
            return self.attend(x, x, x)[0]

    recording = run(Small().eval(), {"picture": torch.randn(1, 1, 6, 15)})
    assert recording.axis_places(0)[1] == [PatchGrid(2, 5, 0)]


@pytest.mark.parametrize("name", ["vit_mae", "videomae", "segformer"])
def test_patches_that_are_shuffled_filmed_or_overlapping_get_no_place(name):
    model, given = build(name)
    assert run(model, given).places is None


def swin(size):
    torch.manual_seed(0)
    sizes = {"patch_size": 2, "embed_dim": 12, "depths": [2, 2], "num_heads": [2, 3], "window_size": 4}
    return SwinModel(SwinConfig(image_size=size, **sizes)).eval().double()


@pytest.mark.parametrize("size", [(16, 16), (24, 20)])
def test_the_windows_of_swin_are_stitched_to_the_image(size):
    model, pixels = swin(max(size)), torch.randn(1, 3, *size, dtype=torch.float64)
    before = run(model, {"pixel_values": pixels})
    layers = before.layers()
    grids = [before.axis_places(layer)[1][0] for layer in layers]
    assert [(grid.rows, grid.columns) for grid in grids] == [(size[0] // n, size[1] // n) for n in (2, 2, 4, 4)]
    for row, column in ((0, 0), (5, 7), (3, 4)):
        after = run(model, {"pixel_values": change_patch(pixels, row, column, size=2)})
        first, second = (find_changed_keys(before, after, layer) for layer in layers[:2])
        assert first == {grids[0].find_token(row, column, 16)}
        window = {patch for patch in grids[0].locate_tokens(16)[next(iter(first))[0]].tolist() if patch >= 0}
        located = grids[1].locate_tokens(16)
        assert {int(located[place]) for place in second if located[place] >= 0} == window  # of the windows that are not shifted


class ShiftedWindows(nn.Module):
    """Patches in windows of 4 x 4 that are shifted by 2, of a grid that is padded before it is shifted, or after as in timm."""

    window_size, shift_size = 4, 2

    def __init__(self, shifts_first):
        super().__init__()
        self.shifts_first, self.cut, self.attend = (
            shifts_first,
            nn.Conv2d(3, 8, 2, 2),
            nn.MultiheadAttention(8, 2, batch_first=True),
        )
        nn.init.normal_(self.attend.in_proj_bias)

    def forward(self, pixels):
        x = self.cut(pixels)
        steps = [lambda x: x.roll((-2, -2), (2, 3)), lambda x: nn.functional.pad(x, (0, -x.shape[3] % 4, 0, -x.shape[2] % 4))]
        for step in steps if self.shifts_first else reversed(steps):
            x = step(x)
        x = x.unflatten(3, (-1, 4)).unflatten(2, (-1, 4)).permute(0, 2, 4, 3, 5, 1).reshape(-1, 16, 8)
        return self.attend(x, x, x)[0]


@pytest.mark.parametrize("shifts_first", [False, True])
@pytest.mark.parametrize("size", [(20, 28), (16, 24)])
def test_windows_are_found_whether_the_grid_is_padded_before_it_is_shifted_or_after(shifts_first, size):
    torch.manual_seed(0)
    model, pixels = nn.Sequential(ShiftedWindows(shifts_first)).double().eval(), torch.randn(1, 3, *size, dtype=torch.float64)
    before = run(model, {"input": pixels})
    (layer,) = before.layers()
    (grid,) = before.axis_places(0)[1]
    for row, column in ((0, 0), (7, 1), (5, 11)):
        after = run(model, {"input": change_patch(pixels, row, column, size=2)})
        assert find_changed_keys(before, after, layer) == {grid.find_token(row, column, 16)}


class Reading(nn.Module):
    """Patches look at the words of a prompt, and words at what queries made of the patches, all of them 16 or 17."""

    def __init__(self):
        super().__init__()
        self.cut = nn.Conv2d(3, 8, 4, 4)
        self.read, self.attn_pool, self.cross = (nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(3))
        self.queries = nn.Parameter(torch.randn(1, 17, 8))

    def forward(self, pixels, words):
        x = self.cut(pixels).flatten(2).mT
        made = self.attn_pool(self.queries.expand(len(x), -1, -1), x, x)[0][:, 1:]
        made = made + self.read(x, words, words)[0]
        return self.cross(words, made, made)[0]


@pytest.mark.parametrize("words", [16, 5])
def test_words_and_learned_queries_that_are_as_many_as_the_patches_have_no_places(words):
    torch.manual_seed(0)
    given = {"pixels": torch.randn(1, 3, 16, 16), "words": torch.randn(1, words, 8)}
    recording = run(Reading().eval(), given)
    assert recording.axis_places("read", kind="cross") == recording.axis_places("cross", kind="cross") == ([], [])
    assert (recording.places or {}) == ({} if words == 16 else {"attn_pool": PatchGrid(4, 4, 0)})


class Pooling(nn.Module):
    """Queries look at patches, beside a mask of the pixels or a prompt that is not read."""

    def __init__(self):
        super().__init__()
        self.cut, self.queries = nn.Conv2d(3, 8, 4, 4), nn.Parameter(torch.randn(1, 3, 8))
        self.pool = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, pixels, other):
        x = self.cut(pixels).flatten(2).mT
        return self.pool(self.queries.expand(len(x), -1, -1), x, x)[0]


@pytest.mark.parametrize("is_nested", [False, True])
def test_patches_beside_a_mask_of_as_many_rows_of_pixels_or_nested_words_have_their_places(is_nested):
    words = torch.nested.nested_tensor([torch.ones(5, 8), torch.ones(3, 8)], layout=torch.jagged)
    other = words if is_nested else torch.ones(2, 16, 16)
    recording = run(Pooling().eval(), {"pixels": torch.randn(2, 3, 16, 16), "other": other})
    assert recording.axis_places("pool", kind="cross") == ([], [PatchGrid(4, 4, 0)])


def test_patches_that_look_at_other_tokens_keep_their_places():
    torch.manual_seed(0)
    sizes = {"image_size": 32, "patch_size": 4, "output_channels": 8, "num_pos_feats": 4}
    vision = {**SMALL, **sizes, "global_attn_indexes": [0, 1]}
    prompts = {"hidden_size": 8, "image_size": 32, "patch_size": 4, "mask_input_channels": 4}
    decoder = {"hidden_size": 8, "num_attention_heads": 2, "mlp_dim": 16, "iou_head_hidden_dim": 8}
    config = SamConfig(vision_config=vision, prompt_encoder_config=prompts, mask_decoder_config=decoder)
    given = {"pixel_values": torch.randn(1, 3, 32, 32), "input_points": torch.rand(1, 1, 2, 2)}
    recording = run(SamModel(config).eval(), given)
    layers = [call.name for call in recording.calls if call.name.endswith("token_to_image")]
    assert len(layers) == 3
    for layer in layers:
        assert recording.axis_places(layer, kind="cross") == ([], [PatchGrid(8, 8, 0)])


def test_the_padded_windows_of_sam_are_found_too():
    torch.manual_seed(0)
    sizes = {"image_size": 32, "patch_size": 4, "output_channels": 8, "mlp_dim": 16}
    config = SamVisionConfig(**SMALL, **sizes, window_size=3, global_attn_indexes=[1])
    model, pixels = SamVisionModel(config).eval().double(), torch.randn(2, 3, 32, 32, dtype=torch.float64)
    before = run(model, {"pixel_values": pixels})
    windowed, whole = before.layers()
    (grid,) = before.axis_places(windowed)[1]
    assert (grid.rows, grid.columns, grid.windows) == (8, 8, 9)
    assert before.axis_places(whole)[1] == [PatchGrid(8, 8, 0)]
    for row, column in ((0, 0), (5, 4), (7, 7)):
        after = run(model, {"pixel_values": change_patch(pixels, row, column)})
        window, token = grid.find_token(row, column, 9)
        assert find_changed_keys(before, after, windowed) == {(window, token), (window + 9, token)}


def llava(size=12):
    torch.manual_seed(0)
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
    vision = {**small, "image_size": size, "patch_size": 4, "model_type": "clip_vision_model"}
    text = {**small, "vocab_size": 53, "model_type": "llama", "num_key_value_heads": 2}
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=50, vision_feature_layer=-3)
    return LlavaForConditionalGeneration(config).eval().double()


def test_the_image_tokens_of_a_text_are_the_patches_whose_keys_move():
    model, pixels = llava(), torch.randn(1, 3, 12, 12, dtype=torch.float64)
    ids = torch.tensor([[1, 7, *[50] * 9, 8, 9]])
    given = {"input_ids": ids, "pixel_values": pixels}
    before = run(model, given)
    (grid,) = before.axis_places(0, part="language_model")[1]
    assert (grid.rows, grid.columns, grid.start) == (3, 3, 2)
    (tower,) = before.axis_places(0, part="vision_tower")[1]
    assert tower.start == 1
    path = before.layers(part="language_model")[0]
    for row, column in ((0, 0), (1, 2), (2, 1)):
        after = run(model, {**given, "pixel_values": change_patch(pixels, row, column)})
        assert find_changed_keys(before, after, path) == {(0, grid.find_token(row, column, 13)[1])}


def test_the_words_that_a_model_writes_look_at_the_patches_of_its_prompt():
    model = llava()
    ids = torch.tensor([[1, 7, *[50] * 9, 8]])
    pixels = torch.randn(1, 3, 12, 12, dtype=torch.float64)
    with torch.no_grad(), record(model) as recording:
        model.generate(input_ids=ids, pixel_values=pixels, min_new_tokens=3, max_new_tokens=3, do_sample=False)
    (grid,) = recording.axis_places(0, part="language_model")[1]
    assert recording.map(0, part="language_model").shape[3] > 12
    assert grid.find_token(2, 2, recording.map(0, part="language_model").shape[3]) == (0, 10)


def test_a_text_that_follows_without_an_image_has_no_patches():
    model = llava()
    with torch.no_grad(), record(model) as recording:
        model(input_ids=torch.tensor([[1, *[50] * 9, 8]]), pixel_values=torch.randn(1, 3, 12, 12, dtype=torch.float64))
        model(input_ids=torch.tensor([[1, *[7] * 9, 8]]))
    assert recording.places is None


def test_two_images_of_a_text_are_two_grids():
    model = llava()
    ids = torch.tensor([[1, *[50] * 9, 7, *[50] * 9]])
    recording = run(model, {"input_ids": ids, "pixel_values": torch.randn(2, 3, 12, 12, dtype=torch.float64)})
    grids = recording.axis_places(0, part="language_model")[1]
    assert [(grid.rows, grid.columns, grid.start) for grid in grids] == [(3, 3, 1), (3, 3, 11)]


def test_the_words_of_paligemma_look_at_its_patches():
    model, given = build("paligemma")
    recording = run(model, given)
    part = next(part for part in recording.last.parts if "language" in part)
    (grid,) = recording.axis_places(0, part=part)[1]
    assert (grid.rows, grid.columns, grid.start) == (3, 3, 2)


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_packed_images_are_found_in_blocks_and_their_merged_tokens_in_the_text(name):
    model, given = build(name)
    before = run(model, given)
    layers = {part: before.layers(part=part)[0] for part in before.last.parts}
    visual = next(layer for part, layer in layers.items() if part == "visual")
    grids = before.axis_places(visual)[1]
    assert [(grid.rows, grid.columns) for grid in grids] == [(4, 2), (2, 6)]
    total = before.map(visual).shape[3]
    for place in (0, 3, 6, 9, 15, 19):
        image, patch = (0, place) if place < 8 else (1, place - 8)
        changed = given["pixel_values"].clone()
        changed[place] += 1
        after = run(model, {**given, "pixel_values": changed})
        one, other = (recording.map(visual).planes.request.k for recording in (before, after))
        moved = (one != other).any(3).any(1).nonzero()[:, 1].tolist()
        grid = grids[image]
        row, column = divmod(PatchGrid.from_blocks(grid.rows, grid.columns, 2).order[0][patch], grid.columns)
        assert moved == [grid.find_token(row, column, total)[1]]
    text = next(layer for part, layer in layers.items() if "language" in part)
    assert [(grid.rows, grid.columns, grid.start) for grid in before.axis_places(text)[1]] == [(2, 1, 2), (1, 3, 6)]


def test_words_that_are_as_many_as_the_packed_patches_are_not_taken_for_these():
    model, _ = build("qwen2_vl")
    ids = torch.tensor([[1, *[99] * 6, *range(3, 20)]])  # 24 tokens, and 24 patches
    given = {"input_ids": ids, "pixel_values": torch.randn(24, 24).double(), "image_grid_thw": torch.tensor([[1, 4, 6]])}
    recording = run(model, {**given, "mm_token_type_ids": (ids == 99).int()})
    assert recording.map(0, part="visual").shape[2:] == recording.map(0, part="language_model").shape[2:]
    assert recording.axis_places(0, part="language_model")[1] == [PatchGrid(2, 3, 1)]
    assert [(grid.rows, grid.columns) for grid in recording.axis_places(0, part="visual")[1]] == [(4, 6)]


@pytest.mark.parametrize("same", [True, False])
def test_rows_of_a_batch_that_have_images_of_the_same_sizes_have_the_same_places(same):
    model, given = build("qwen2_vl")
    sizes = [[1, 4, 2], [1, 2, 6], [1, 4, 2], [1, 2, 6] if same else [1, 6, 2]]  # of two texts
    given |= {name: given[name].repeat(2, 1) for name in ("input_ids", "pixel_values", "mm_token_type_ids")}
    recording = run(model, {**given, "image_grid_thw": torch.tensor(sizes)})
    places = recording.axis_places(0, part="language_model")[1]
    assert [(grid.rows, grid.columns, grid.start) for grid in places] == ([(2, 1, 2), (1, 3, 6)] if same else [])
    assert len(recording.axis_places(0, part="visual")[1]) == 4


def test_packed_patches_that_a_model_merges_after_its_tower_are_not_taken_for_blocks():
    from transformers import PaddleOCRVLConfig, PaddleOCRVLForConditionalGeneration

    torch.manual_seed(0)
    text = {**WORDED, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
    vision = {**SMALL, "patch_size": 4, "image_size": 32, "spatial_merge_size": 2}
    config = PaddleOCRVLConfig(text_config=text, vision_config=vision, image_token_id=50)
    model = PaddleOCRVLForConditionalGeneration(config).eval().double()
    ids = place_ids(6)
    given = {"input_ids": ids, "pixel_values": make_pixels(4, 24), "image_grid_thw": torch.tensor([[1, 4, 6]])}
    recording = run(model, {**given, "mm_token_type_ids": (ids == 50).int()})  # its patches come row by row
    assert recording.axis_places(0, part="visual") == ([], [])
    assert recording.axis_places(0, part="language_model")[1] == [PatchGrid(2, 3, 2)]


def test_packed_patches_that_a_model_sorts_into_windows_are_found_there():
    family = next(family for family in FAMILIES if family.name == "qwen2_5_vl")
    settings = {**family.settings, "vision_config": {**family.settings["vision_config"], "window_size": 8}}
    model = replace(family, settings=settings).build(torch.float64)
    torch.manual_seed(0)
    ids = torch.tensor([[1, *[99] * 15, 7]])
    given = {"input_ids": ids, "pixel_values": torch.randn(60, 24).double(), "image_grid_thw": torch.tensor([[1, 6, 10]])}
    given["mm_token_type_ids"] = (ids == 99).int()
    before = run(model, given)
    visual = before.layers(part="visual")[0]
    (grid,) = before.axis_places(visual)[1]
    for place in (0, 9, 22, 38, 59):
        row, column = divmod(PatchGrid.from_blocks(6, 10, 2).order[0][place], 10)
        changed = given["pixel_values"].clone()
        changed[place] += 1
        after = run(model, {**given, "pixel_values": changed})
        one, other = (recording.map(visual).planes.request.k for recording in (before, after))
        assert (one != other).any(3).any(1).nonzero()[:, 1].tolist() == [grid.find_token(row, column, 60)[1]]


def test_frames_of_whisper_and_wav2vec2_have_their_times():
    model, given = build("whisper")
    recording = run(model, given)
    assert recording.axis_places(0, "cross") == ([], [AudioFrames(0.02)])
    assert recording.axis_places(0, part="encoder")[1] == [AudioFrames(0.02)]
    assert recording.axis_places(0, part="decoder")[1] == []
    model, given = build("wav2vec2")
    assert run(model, given).axis_places(0)[1] == [AudioFrames(4 * 2 / 16_000)]


def test_a_model_that_hears_samples_and_writes_words_has_frames_in_its_encoder_and_cross_attention_alone():
    from transformers import SpeechT5Config, SpeechT5ForSpeechToText

    sizes = {f"{part}_{name}": n for part in ("encoder", "decoder") for name, n in SPEECH.items()}
    cut = {"conv_dim": (8, 8), "conv_stride": (4, 2), "conv_kernel": (4, 2), "num_feat_extract_layers": 2}
    positions = {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2}
    model = SpeechT5ForSpeechToText(SpeechT5Config(hidden_size=16, vocab_size=37, **sizes, **cut, **positions)).eval()
    recording = run(model, {"input_values": torch.randn(1, 800), "decoder_input_ids": torch.tensor([[2, 7, 5]])})
    frames = AudioFrames(8 / 16_000)
    assert recording.axis_places(0, part="encoder") == ([frames], [frames])
    assert recording.axis_places(0, part="decoder") == ([], [])
    assert recording.axis_places(0, "cross") == ([], [frames])


def test_places_that_were_set_by_hand_stay():
    model, given = build("vit")
    with torch.no_grad(), record(model) as recording:
        recording.places = PatchGrid(9, 1)
        model(**given)
    assert recording.places == PatchGrid(9, 1)


def test_a_text_alone_has_no_places():
    model, given = build("llama")
    assert run(model, given).places is None


def make_pixels(size, *batch):
    return torch.randn(*batch, 3, size, size, dtype=torch.float64)


def place_ids(*counts):
    """A text with these many image tokens, with words before, between and behind them."""
    return torch.tensor([[1, 5, *(one for count in counts for one in (*[50] * count, 7))]])


def test_patches_that_are_merged_to_squares_are_the_tokens_whose_keys_move():
    from transformers import InternVLConfig, InternVLForConditionalGeneration

    torch.manual_seed(0)
    vision = {**SMALL, "image_size": [16, 16], "patch_size": [2, 2]}
    settings = {"downsample_ratio": 0.5, "image_token_id": 50, "vision_feature_layer": -3}
    model = InternVLForConditionalGeneration(
        InternVLConfig(text_config={**WORDED, "model_type": "qwen2"}, vision_config=vision, **settings)
    )
    model = model.eval().double()
    given = {"input_ids": place_ids(16), "pixel_values": make_pixels(16, 1)}
    before = run(model, given)
    (grid,) = before.axis_places(0, part="language_model")[1]
    assert (grid.rows, grid.columns, grid.start) == (4, 4, 2)
    path = before.layers(part="language_model")[0]
    for row, column in ((0, 3), (5, 2)):
        after = run(model, {**given, "pixel_values": change_patch(given["pixel_values"], row, column, size=2)})
        assert find_changed_keys(before, after, path) == {(0, grid.find_token(row // 2, column // 2, 19)[1])}


def test_pooled_patches_and_the_tiles_of_an_image_are_found_in_the_text():
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration, Idefics3Config, Idefics3ForConditionalGeneration

    text = {**WORDED, "model_type": "gemma3_text", "sliding_window": 8}
    vision = {**SIGLIP, "model_type": "siglip_vision_model"}
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=16, image_token_index=50)
    ids = place_ids(16)
    given = {"input_ids": ids, "pixel_values": make_pixels(16, 1), "token_type_ids": (ids == 50).long()}
    recording = run(Gemma3ForConditionalGeneration(config).eval().double(), given)
    assert recording.places["model.language_model.layers"] == PatchGrid(4, 4, 2)
    text = {**WORDED, "model_type": "llama", "pad_token_id": 0}
    config = Idefics3Config(text_config=text, vision_config=SIGLIP, scale_factor=2, image_token_id=50)
    given = {"input_ids": place_ids(16, 16), "pixel_values": make_pixels(16, 1, 2)}
    recording = run(Idefics3ForConditionalGeneration(config).eval().double(), given)
    assert recording.places["model.text_model.layers"] == [PatchGrid(4, 4, 2), PatchGrid(4, 4, 19)]


def test_learned_queries_have_no_places_though_they_are_as_many_as_patches():
    from transformers import Blip2Config, Blip2ForConditionalGeneration

    text = {**WORDED, "model_type": "opt", "ffn_dim": 8, "word_embed_proj_dim": 16, "pad_token_id": 0}
    vision, qformer = {**SMALL, "image_size": 12, "patch_size": 4}, {**SMALL, "vocab_size": 30, "encoder_hidden_size": 16}
    config = Blip2Config(
        vision_config=vision, qformer_config=qformer, text_config=text, num_query_tokens=9, image_token_index=50
    )
    given = {"input_ids": place_ids(9), "pixel_values": make_pixels(12, 1)}
    recording = run(Blip2ForConditionalGeneration(config).eval().double(), given)
    assert recording.axis_places(0, part="language_model") == ([], [])
    assert recording.axis_places(0, part="vision_model")[1][0].start == 1
