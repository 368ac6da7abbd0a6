"""Places that record finds by itself: a patch whose pixels change moves the keys at its token, and no others."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    DynamicCache,
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
from show.vision_models import make_llava

PATCH = 4  # pixels, in the images of the families

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
WORDED = {**SMALL, "vocab_size": 60, "num_key_value_heads": 2, "max_position_embeddings": 64, "head_dim": 8}
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


@pytest.mark.parametrize("name", ["vit_mae", "videomae"])
def test_patches_that_are_shuffled_or_filmed_get_no_place(name):
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


class UnevenSides(nn.Module):
    """A stem of patches of 4 x 4 pixels of an image whose sides are no multiples of 4: padded, or what is left over cut off."""

    def __init__(self, pads):
        super().__init__()
        self.pads, self.cut = pads, nn.Conv2d(3, 8, 4, 4)

    def forward(self, pixels):
        sides = pixels.shape[2:]
        return self.cut(F.pad(pixels, (0, -sides[1] % 4, 0, -sides[0] % 4)) if self.pads else pixels)


@pytest.mark.parametrize(("size", "pads", "window"), [((30, 29), False, None), ((30, 29), True, 2), ((31, 16), True, None)])
def test_sides_that_are_no_multiples_of_a_patch_are_found_padded_or_cut_off(size, pads, window):
    torch.manual_seed(0)
    layer = Attention() if window is None else Squares(False)
    model = Layers(UnevenSides(pads), layer).double().eval()
    pixels = torch.randn(1, 3, *size, dtype=torch.float64)
    before = run(model, {"pixels": pixels})
    (grid,) = before.axis_places(0)[1]
    (name,) = before.layers()
    assert (grid.rows, grid.columns) == tuple(-(-side // 4) if pads else side // 4 for side in size)
    top, left, bottom, right = grid.extent
    for pixel in ((0, 0), (5, 13), (size[0] - 1, size[1] - 1)):
        after = run(model, {"pixels": change_pixel(pixels, *pixel)})
        row = int(((pixel[0] + 0.5) / size[0] - top) / (bottom - top) * grid.rows)
        column = int(((pixel[1] + 0.5) / size[1] - left) / (right - left) * grid.columns)
        is_cut = row >= grid.rows or column >= grid.columns
        expected = set() if is_cut else {grid.find_token(row, column, before[name][0].map.shape[3])}
        assert find_changed_keys(before, after, name) == expected


@pytest.mark.parametrize(("images", "prompts"), [(1, 1), (1, 3), (2, 2)])
def test_patches_that_look_at_other_tokens_keep_their_places(images, prompts):
    torch.manual_seed(0)
    sizes = {"image_size": 32, "patch_size": 4, "output_channels": 8, "num_pos_feats": 4}
    vision = {**SMALL, **sizes, "global_attn_indexes": [0, 1]}
    prompt = {"hidden_size": 8, "image_size": 32, "patch_size": 4, "mask_input_channels": 4}
    decoder = {"hidden_size": 8, "num_attention_heads": 2, "mlp_dim": 16, "iou_head_hidden_dim": 8}
    config = SamConfig(vision_config=vision, prompt_encoder_config=prompt, mask_decoder_config=decoder)
    given = {"pixel_values": torch.randn(images, 3, 32, 32), "input_points": torch.rand(images, prompts, 2, 2)}
    recording = run(SamModel(config).eval(), given)
    layers = [call.name for call in recording.calls if call.name.endswith("token_to_image")]
    assert len(layers) == 3
    for layer in layers:
        assert recording.map(layer, kind="cross").shape[0] == images * prompts
        assert recording.axis_places(layer, kind="cross") == ([], [PatchGrid(8, 8, 0)])


@pytest.mark.parametrize(
    "repeat",
    [
        lambda x: x.repeat_interleave(3, 0),
        lambda x: x[:, None].expand(-1, 3, -1, -1).flatten(0, 1),
        lambda x: x.repeat(3, 1, 1),
    ],
)
def test_the_rows_of_a_decoder_that_repeats_its_images_are_the_patches_whose_keys_move(repeat):
    class Prompted(nn.Module):
        def __init__(self):
            super().__init__()
            self.cut, self.key, self.query = nn.Conv2d(3, 8, 4, 4), nn.Linear(8, 8), nn.Parameter(torch.randn(1, 5, 8))

        def forward(self, pixel_values):
            x = self.key(repeat(self.cut(pixel_values).flatten(2).mT))
            return F.scaled_dot_product_attention(self.query.expand(len(x), 1, 5, 8), x[:, None], x[:, None])

    torch.manual_seed(0)
    model, pixels = Prompted().eval(), torch.randn(2, 3, 12, 20)
    before, after = (run(model, {"pixel_values": one}) for one in (pixels, change_patch(pixels, 1, 3)))
    (grid,) = before.axis_places(0, before.calls[0].kind)[1]
    assert (grid.rows, grid.columns) == (3, 5)
    assert find_changed_keys(before, after, "") == {(row, grid.find_token(1, 3, 15)[1]) for row in range(6)}


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


def test_places_that_were_set_by_hand_stay():
    model, given = build("vit")
    with torch.no_grad(), record(model) as recording:
        recording.places = PatchGrid(9, 1)
        model(**given)
    assert recording.places == PatchGrid(9, 1)


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


PINPOINTS = [[8, 16], [16, 8], [16, 16], [8, 24]]


@pytest.mark.parametrize(("size", "is_generation"), [((11, 30), False), ((30, 11), True), ((20, 21), False), ((9, 40), False)])
def test_joined_tiles_without_their_padding_are_the_tokens_that_the_model_puts_there(size, is_generation):
    """The model itself puts numbered features of the tiles in their places."""
    from transformers import LlavaNextConfig, LlavaNextForConditionalGeneration

    torch.manual_seed(0)
    vision = {**SMALL, "image_size": 8, "patch_size": 2, "model_type": "clip_vision_model"}
    text = {**WORDED, "model_type": "llama", "pad_token_id": 0, "eos_token_id": None}
    config = LlavaNextConfig(text_config=text, vision_config=vision, image_grid_pinpoints=PINPOINTS, image_token_index=50)
    model = LlavaNextForConditionalGeneration(config).eval().double()
    tall, wide = max(PINPOINTS, key=lambda one: (kept(size, one), -one[0] * one[1]))
    count = tall // 8 * (wide // 8)
    numbers = torch.arange((1 + count) * 16, dtype=torch.float64).view(1 + count, 16, 1)
    features = model.model.pack_image_features([numbers], torch.tensor([size]), "default", torch.tensor([-1.0]))[0]
    placed = features[0].flatten().long().tolist()
    given = {"input_ids": place_ids(len(placed)), "image_sizes": torch.tensor([size])}
    given["pixel_values"] = make_pixels(8, 1, 1 + count)
    if is_generation:
        with torch.no_grad(), record(model) as recording:
            model.generate(**given, max_new_tokens=3, do_sample=False)
    else:
        recording = run(model, given)
    fine, small = recording.places["model.language_model.layers"]
    assert small == PatchGrid(4, 4, 2)
    joined = (torch.arange(count * 16) + 16).view(tall // 8, wide // 8, 4, 4).transpose(1, 2).reshape(tall // 2, wide // 2)
    top, left = (joined.shape[0] - fine.rows) // 2, (joined.shape[1] - fine.columns) // 2
    assert min(top, left) == 0
    shown = joined[top : top + fine.rows, left : left + fine.columns].flatten()
    cells = fine.locate_tokens(2 + len(placed))[0, 2:].tolist()
    assert cells == [-1 if number < 16 else shown.tolist().index(number) for number in placed]


def kept(size, resolution):
    scale = min(side / own for side, own in zip(resolution, size, strict=True))
    return min(int(size[0] * scale) * int(size[1] * scale), size[0] * size[1])


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


class Rearrange(nn.Module):
    """A layer as einops has it, for patches of p1 x p2 pixels: its pattern states the order of the tokens."""

    def __init__(self, pattern, **axes_lengths):
        super().__init__()
        self.pattern, self.axes_lengths = pattern, axes_lengths

    def forward(self, x):
        p1, p2 = self.axes_lengths["p1"], self.axes_lengths["p2"]
        x = x.unflatten(3, (-1, p2)).unflatten(2, (-1, p1)).permute(0, 2, 4, 3, 5, 1).flatten(3)
        by_columns = self.pattern.split("->")[1].split()[1:3] in (["(w", "h)"], ["w", "h"])
        return (x.transpose(1, 2) if by_columns else x).flatten(1, 2)


class Attention(nn.Module):
    """Attention of 2 heads: of the first `queries` tokens; over channels; on pooled keys; of weights that heads mix."""

    def __init__(self, width=8, queries=None, pool=None, of="tokens"):
        super().__init__()
        self.to_q, self.to_kv, self.out = (nn.Linear(width, n * width) for n in (1, 2, 1))
        self.mix, self.pool, self.queries, self.of = nn.Linear(2, 2), pool, queries, of

    def forward(self, x, sides=None):
        if isinstance(self.pool, nn.Conv2d):
            y = self.pool(x.mT.unflatten(2, sides)).flatten(2).mT
        else:
            y = x if self.pool is None else self.pool(x.mT).mT
        q = x if self.queries is None else x[:, : self.queries]
        q, k, v = (one.unflatten(2, (2, -1)).transpose(1, 2) for one in (self.to_q(q), *self.to_kv(y).chunk(2, -1)))
        if self.of == "channels":
            q, k = (F.normalize(one.mT, dim=-1) for one in (q, k))
            return self.out((F.scaled_dot_product_attention(q, k, v.mT, scale=3.0)).mT.transpose(1, 2).flatten(2))
        if self.of == "mixed":
            weights = self.mix((q @ k.mT).softmax(-1).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
            return self.out((weights @ v).transpose(1, 2).flatten(2))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Layers(nn.Module):
    """A stem that makes tokens of images, (b, c, h, w) or (b, t, c), and layers of attention, after a class token or not."""

    def __init__(self, stem, *layers, special=None, behind=False):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.layers, self.behind = stem, nn.ModuleList(layers), behind
        if special is not None:
            self.register_parameter(special, nn.Parameter(torch.randn(2 if "register" in special else 1, 8)))
        self.special = special

    def forward(self, pixels):
        x = self.stem(pixels)
        sides = x.shape[2:]
        x = x.flatten(2).mT if x.dim() == 4 else x
        if self.special is not None:
            tokens = getattr(self, self.special).expand(len(x), -1, -1)
            x = torch.cat([x, tokens] if self.behind else [tokens, x], 1)
        for layer in self.layers:
            y = layer(x, sides) if isinstance(layer, (Attention, Squares)) else layer(x)
            x = x + y if y.shape == x.shape else y
        return x


def find_stem(name):
    """A stem that makes 8 channels of patches of 4 x 4 pixels."""
    linear = nn.Linear(48, 8)
    linear.patch_size = (4, 4)
    return {
        "rows": lambda: nn.Sequential(Rearrange("b c (h p1) (w p2) -> b (h w) (p1 p2 c)", p1=4, p2=4), linear),
        "axes": lambda: nn.Sequential(Rearrange("b c (f p1) (g p2) -> b f g (p1 p2 c)", p1=4, p2=4), linear),
        "columns": lambda: nn.Sequential(Rearrange("b c (h p1) (w p2) -> b (w h) (p1 p2 c)", p1=4, p2=4), linear),
        "stated": Stated,
        "overlapping": lambda: nn.Conv2d(3, 8, 7, 4, 3),
        "strided": lambda: nn.Sequential(nn.Conv2d(3, 6, 3, 2, 1), nn.GELU(), nn.Conv2d(6, 8, 3, 2, 1)),
    }[name]()


class Stated(nn.Module):
    """Patches that a linear layer reads, of a size that the module states."""

    def __init__(self, side=4):
        super().__init__()
        self.patch_size, self.read = (side, side), nn.Linear(3 * side**2, 8)

    def forward(self, pixels):
        return self.read(F.unfold(pixels, self.patch_size, stride=self.patch_size).mT)


def change_pixel(pixels, row, column):
    """The images with another pixel, that only one token of a stem with strides of 4 reads."""
    changed = pixels.clone()
    changed[..., row, column] += 5
    return changed


def find_moved_key(before, after, name):
    """The batch row and the token of the key of a layer that moved most, or of its columns where no keys are stored."""
    one, other = (recording[name][0].map for recording in (before, after))
    if hasattr(one, "planes"):
        moved = (one.planes.request.k - other.planes.request.k).abs().sum((1, 3))
    else:
        moved = (one[:, :] - other[:, :]).abs().sum((1, 2))
    return divmod(int(moved.argmax()), moved.shape[1])


def check_moved_keys(model, layers, size=(16, 24)):
    """Check that the keys of layers move most where a pixel of a patch of 4 x 4 changes, as their grids state."""
    pixels = torch.randn(1, 3, *size, dtype=torch.float64)
    model = model.eval().double()
    before = run(model, {"pixels": pixels})
    for name, kind, start in layers:
        (grid,) = before.axis_places(name, kind)[1]
        assert (grid.rows, grid.columns, grid.start) == (size[0] // 4, size[1] // 4, start)
        for row, column in ((0, 0), (1, 3), (3, 2)):
            after = run(model, {"pixels": change_pixel(pixels, 4 * row, 4 * column)})
            keys = before[name][0].map.shape[3]
            assert find_moved_key(before, after, name) == grid.find_token(row, column, keys)
    return before


@pytest.mark.parametrize(
    ("stem", "special"),
    [("rows", None), ("axes", "cls_token"), ("stated", None), ("overlapping", None), ("strided", "cls_token")],
)
def test_patches_that_einops_a_linear_layer_or_strides_cut_have_their_places(stem, special):
    torch.manual_seed(0)
    model = Layers(find_stem(stem), Attention(), Attention(), special=special)
    check_moved_keys(model, [("layers.0", "self", 0 if special is None else 1)])


@pytest.mark.parametrize(("stem", "special"), [("columns", None), ("rows", "register_tokens")])
def test_patches_column_by_column_or_before_registers_have_their_places(stem, special):
    torch.manual_seed(0)
    check_moved_keys(Layers(find_stem(stem), Attention(), special=special, behind=True), [("layers.0", "self", 0)])


def test_layers_of_mixed_heads_have_places_and_so_have_the_keys_that_a_class_token_looks_at():
    torch.manual_seed(0)
    model = Layers(find_stem("rows"), Attention(of="mixed"), Attention(queries=1), special="cls_token")
    before = check_moved_keys(model, [("layers.0", "implicit", 1), ("layers.1", "self", 1)])
    assert before.axis_places("layers.1")[0] == []  # its query is the class token


@pytest.mark.parametrize(("stem", "width"), [("rows", 32), ("strided", 8)])
def test_channels_have_no_places_though_they_are_as_many_as_patches(stem, width):
    layers = [nn.Linear(8, width), Attention(width, of="channels")]
    recording = run(Layers(find_stem(stem), *layers).eval(), {"pixels": torch.randn(2, 3, 16, 16)})
    assert recording.map(0).shape[3] == width // 2  # of 16 patches
    assert recording.places is None


@pytest.mark.parametrize("stem", ["overlapping", "strided"])
def test_keys_that_a_convolution_pools_are_patches_of_a_coarser_grid(stem):
    torch.manual_seed(0)
    model = Layers(find_stem(stem), Attention(pool=nn.Conv2d(8, 8, 2, 2))).eval().double()
    pixels = torch.randn(1, 3, 32, 48, dtype=torch.float64)
    before = run(model, {"pixels": pixels})
    (grid,) = before.axis_places(0)[1]
    assert before.axis_places(0)[0] == []
    assert (grid.rows, grid.columns) == (4, 6)
    for row, column in ((0, 0), (1, 4), (3, 2)):
        after = run(model, {"pixels": change_pixel(pixels, 8 * row, 8 * column)})
        assert find_moved_key(before, after, "layers.0") == grid.find_token(row, column, 24)


def test_segformer_has_places_for_the_keys_that_it_pools():
    model, given = build("segformer")
    recording = run(model, given)
    queries, keys = recording.axis_places(0)
    (q, k) = recording.map(0).shape[2:]
    assert q > k == keys[0].length
    assert queries == []


class Squares(nn.Module):
    """Attention in squares of 2 x 2 tokens; or of their queries that are the same in all of them, as in GCViT."""

    def __init__(self, is_global):
        super().__init__()
        self.attend, self.is_global = nn.MultiheadAttention(8, 2, batch_first=True), is_global

    def forward(self, x, sides=(4, 4)):
        x = F.pad(x.unflatten(1, sides), (0, 0, 0, sides[1] % 2, 0, sides[0] % 2))  # with whole squares
        x = x.unflatten(2, (-1, 2)).unflatten(1, (-1, 2)).transpose(2, 3).reshape(-1, 4, 8)
        q = x.mean(0, keepdim=True).expand_as(x) if self.is_global else x
        return self.attend(q, x, x)[0]


@pytest.mark.parametrize("is_global", [False, True])
def test_squares_of_tokens_are_windows_and_their_queries_patches_unless_they_are_of_all(is_global):
    torch.manual_seed(0)
    model = Layers(find_stem("strided"), Squares(is_global))
    (grid,) = check_moved_keys(model, [("layers.0.attend", "self", 0)], (16, 16)).axis_places(0)[1]
    assert (grid.windows, grid.has_queries) == (4, not is_global)


def test_a_generation_that_writes_the_token_of_an_image_keeps_the_places_of_its_prompt():
    model, ids = make_llava(), torch.tensor([[1, 7, *[50] * 9, 8, 9]])
    with torch.no_grad(), record(model) as recording:
        model(input_ids=ids, pixel_values=torch.randn(1, 3, 9, 9, dtype=torch.float64), cache=(cache := DynamicCache()))
        model(input_ids=torch.tensor([[50]]), cache=cache)
    assert recording.map(0).shape[2:] == (14, 14)
    assert [(one.rows, one.columns, one.start) for one in recording.axis_places(0)[1]] == [(3, 3, 2)]
