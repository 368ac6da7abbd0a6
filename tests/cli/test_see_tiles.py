"""`regard see --text` of models that cut images into tiles, pack their patches, or look at them by cross attention."""

from importlib.util import find_spec

import numpy as np
import pytest
import torch
from PIL import Image

from cli.test_see import see
from cli.tiled_models import MAKERS, NEEDS
from observe.family import Widened
from regard.cli.image_prompt import load_image_prompter
from regard.cli.image_reader import record_image
from regard.cli.see_words import find_place, list_word_tokens
from regard.show.patch_weights import compute_patch_weights

PROMPT = "what is on her hat ?"
HEIGHT, WIDTH = 122, 183
ADDED = ("out_proj", "o_proj", "fc2", "proj", "down_proj", "projection")  # layers of a tower that write to its residual stream
GRIDS = {  # rows and columns of the patches that words look at, as each model was made: see tiled_models.py
    "llava_next": (8, 12),
    "idefics3": (6, 9),
    "smolvlm": (6, 9),
    "internvl": (6, 9),
    "gemma3": (3, 3),
    "qwen2_vl": (6, 9),
    "qwen2_5_vl": (6, 9),
    "blip": (6, 6),
    "mllama": (12, 12),
}
WHOLE = {"llava_next": (6, 6), "idefics3": (3, 3), "smolvlm": (3, 3), "internvl": (3, 3)}  # of the image that is not cut
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return tmp_path_factory.mktemp("tiled")


@pytest.fixture(scope="module")
def photo():
    return np.random.default_rng(0).integers(60, 200, (HEIGHT, WIDTH, 3), np.uint8)


def save(folders, name):
    lacking = [one for one in NEEDS.get(name, ()) if find_spec(one) is None]
    if lacking:
        pytest.skip(f"{' and '.join(lacking)} not installed, without which transformers does not load this processor")
    if not (folders / name).exists():
        MAKERS[name](folders / name)
    return folders / name


def load(folders, name, tokens=0):
    prompter = load_image_prompter(str(save(folders, name)), PROMPT, tokens)
    prompter.model.double()
    return prompter


@torch.no_grad()
def make_patches_independent(model):
    """Let the tower add nothing to its patches: then each depends on its own pixels."""
    for name, module in model.named_modules():
        if "vision" in name or "visual" in name:
            for path, parameter in module.named_parameters(recurse=False):
                if name.rpartition(".")[2] in ADDED and ("layers" in name or "blocks" in name):
                    parameter.zero_()
                    assert path


def compute_weights(prompter, pixels, name):
    """The weights (h, q, k) of a layer as the model computes them itself, without a kernel."""
    found = []
    prompter.model.set_attn_implementation("eager")
    module = prompter.model.get_submodule(name)
    hook = module.register_forward_hook(lambda _, __, result: found.append(result[1][0]))
    with torch.no_grad(), Widened():
        prompter.run(prompter.prepare(pixels).inputs)
    hook.remove()
    return found[0]


def find_first_layer(recording):
    place = find_place(recording, None)
    return next(n for n in range(place.layer + 1) if list_word_tokens(recording, find_place(recording, str(n)))), place


@pytest.mark.parametrize("name", GRIDS)
def test_each_word_has_the_models_own_weights_on_the_patches(folders, photo, name):
    prompter = load(folders, name)
    with Widened():
        seen = record_image(prompter, photo)
    place = find_place(seen.recording, None)
    grids = seen.recording.axis_places(place.layer, place.kind, place.part)[1]
    path = seen.recording.layers(place.kind, place.part)[place.layer]
    wanted = compute_weights(load(folders, name), photo, path)
    words = list_word_tokens(seen.recording, place)
    assert [str(seen.recording.tokens[n]).strip() for n in words[-6:]] == PROMPT.split()
    for image, grid in enumerate(grids):
        cells = grid.locate_tokens(wanted.shape[2])[0]
        for word in words[-2:]:
            picture = compute_patch_weights(
                seen.recording, place.layer, None, word, kind=place.kind, part=place.part, image=image
            )
            for patch in range(grid.rows * grid.columns):
                weight = wanted[:, word, cells == patch].mean(0)
                found = picture.values.flatten()[patch].nan_to_num(0.0)
                torch.testing.assert_close(found[None], weight, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", GRIDS)
def test_a_patch_is_the_token_whose_key_moves_with_the_pixels_there(folders, photo, name):
    prompter = load(folders, name)
    make_patches_independent(prompter.model)
    before = record_image(prompter, photo)
    layer, place = find_first_layer(before.recording)
    grids = before.recording.axis_places(layer, place.kind, place.part)[1]
    assert [(grid.rows, grid.columns) for grid in grids] == [GRIDS[name], *([WHOLE[name]] if name in WHOLE else [])]
    keys = before.recording.map(layer, kind=place.kind, part=place.part).planes.request.k
    padded = name == "mllama"  # at the right and below: the image fills 2 x 2 tiles only across
    for grid, image in zip(grids, before.images, strict=True):
        shown = round(image.shape[1] * HEIGHT / WIDTH) if padded else image.shape[0]
        for row, column in {(0, 0), (grid.rows * 2 // 3 - 1, grid.columns // 2), (grid.rows // 2, grid.columns - 1)}:
            down, across = grid.rows * shown / image.shape[0], grid.columns
            if row + 1 > down:
                continue
            changed = photo.copy()
            top, bottom = (int((row + share) / down * HEIGHT) for share in (0.25, 0.75))
            left, right = (int((column + share) / across * WIDTH) for share in (0.25, 0.75))
            changed[top:bottom, left:right] = 255
            after = record_image(prompter, changed).recording
            other = after.map(layer, kind=place.kind, part=place.part).planes.request.k
            moved = (other - keys).abs().sum((0, 1, 3))
            inside = grid.locate_tokens(len(moved))[0] >= 0
            token = moved.where(inside, 0).argmax()
            assert grid.locate_tokens(len(moved))[0, token] == row * grid.columns + column


@pytest.mark.parametrize("name", ["llava_next", "idefics3", "blip", "mllama"])
def test_words_that_the_model_writes_look_at_the_patches_too(folders, photo, name):
    seen = record_image(load(folders, name, tokens=3), photo)
    place = find_place(seen.recording, None)
    plain = record_image(load(folders, name), photo).recording
    words, more = (list_word_tokens(one, find_place(one, None)) for one in (plain, seen.recording))
    assert len(more) - len(words) == (1 if name == "blip" else 2)  # BLIP leaves out the last word of the prompt
    keys = seen.recording.map(place.layer, kind=place.kind, part=place.part).shape[3]
    assert len(seen.recording.tokens) == (keys if place.kind == "self" else more[-1] + 1)


def test_tiles_are_told_in_the_table_and_shown_on_the_page_and_in_the_figure(capsys, folders, photo, tmp_path):
    Image.fromarray(photo).save(tmp_path / "photo.png")
    flags = "--text", PROMPT, "--page", tmp_path / "one.html", "--figure", tmp_path / "one.png"
    folder = save(folders, "idefics3")
    capsys.readouterr()  # the progress of transformers
    code, out, err = see(capsys, tmp_path / "photo.png", "--model", folder, *flags)
    assert (code, err) == (0, "")
    said = " ".join(out.split())
    assert "the image as 9 x 6 patches, in 3 x 2 tiles and once whole." in said
    assert "image 1 0." in said.partition("On other tokens: ")[2]
    table = out.partition("On other")[0]
    assert "<row_1_col_2>" not in table  # a token between the tiles
    assert "<global-img>" not in table
    assert (tmp_path / "one.html").read_text(encoding="utf-8").count("data:image/png;base64,") == 2
    code, out, err = see(capsys, tmp_path / "photo.png", "--model", folder, "--patch", "4,5")
    assert (code, err) == (0, "")
    said = " ".join(out.split())
    assert "72 x 48 pixels as 18 x 12 patches, in 3 x 2 tiles and once whole" in said
    assert "180 of 216 patches are not seen: no color." in said  # those of the other five tiles


@pytest.mark.parametrize("name", ["florence2", "kosmos2", "blip2", "blip2 of T5"])
def test_words_that_see_no_patches_are_refused_with_what_to_do(capsys, folders, photo, tmp_path, name):
    Image.fromarray(photo).save(tmp_path / "photo.png")
    flags = "--model", save(folders, name), "--text", PROMPT
    code, _, err = see(capsys, tmp_path / "photo.png", *flags)
    assert code == 2
    said = " ".join(err.split())
    assert "no word looks at tokens that are known as patches" in said
    path = said.partition("pass --head ")[2].partition(" ")[0].rstrip(".")
    code, out, err = see(capsys, tmp_path / "photo.png", *flags, "--head", path)
    assert (code, err) == (0, "")
    assert "what it looks at, layer" in out
