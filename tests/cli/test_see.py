import re

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    BertConfig,
    BertModel,
    CLIPConfig,
    CLIPModel,
    SwinConfig,
    SwinModel,
    ViTConfig,
    ViTForImageClassification,
)

from regard import load
from regard.cli import main
from regard.show.patch_weights import compute_patch_weights

SMALL = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 8}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """An image and models as transformers saves them, with random weights."""
    torch.manual_seed(0)
    place = tmp_path_factory.mktemp("see")
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 56, 3), np.uint8)).save(place / "image.png")
    labels = {"id2label": {0: "cat", 1: "dog"}, "label2id": {"cat": 0, "dog": 1}}
    ViTForImageClassification(ViTConfig(**SMALL, image_size=24, patch_size=4, **labels)).save_pretrained(place / "vit")
    sizes = {"image_size": 24, "patch_size": 2, "embed_dim": 12, "depths": [2, 1], "num_heads": [2, 3], "window_size": 4}
    SwinModel(SwinConfig(**sizes)).save_pretrained(place / "swin")
    vision, text = {**SMALL, "image_size": 24, "patch_size": 4}, {**SMALL, "vocab_size": 31, "max_position_embeddings": 7}
    CLIPModel(CLIPConfig(vision_config=vision, text_config=text, projection_dim=5)).save_pretrained(place / "clip")
    BertModel(BertConfig(**SMALL, vocab_size=31)).save_pretrained(place / "bert")
    return place


def see(capsys, *arguments):
    code = main(["see", *map(str, arguments)])
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.mark.parametrize("width", [40, 80])
def test_an_image_gives_its_layers_in_numbers_and_what_the_class_token_looks_at(capsys, monkeypatch, place, width):
    monkeypatch.setenv("COLUMNS", str(width))
    code, out, err = see(capsys, place / "image.png", "--model", place / "vit")
    assert (code, err) == (0, "")
    said = " ".join(out.split())
    assert re.search(r"vit: 2 layers of 3 heads\. 24 x 24 pixels as 6 x 6 patches, in \d+\.\d s\.", said)
    assert re.search(r"The model says (cat|dog) \(0\.\d\d\)", said)
    assert "class token: what it looks at, layer 1, mean over the heads" in said
    assert len(re.findall(r"^ +[01] +\d+\.\d +0\.\d\d +0\.\d\d +\d+$", out, re.MULTILINE)) == 2
    assert max(map(len, out.splitlines())) <= width


@pytest.mark.slow
def test_the_recording_the_page_and_the_figure_are_of_the_same_query(capsys, place, tmp_path):
    files = {name: tmp_path / f"one.{end}" for name, end in (("out", "reg"), ("page", "html"), ("figure", "png"))}
    flags = [part for name, file in files.items() for part in (f"--{name}", file)]
    code, out, err = see(capsys, place / "image.png", "--model", place / "vit", "--head", "0.1", "--patch", "2,3", *flags)
    assert (code, err) == (0, "")
    assert "patch 2,3: what it looks at, layer 0, head 1" in out
    recording = load(files["out"])
    assert compute_patch_weights(recording, 0, 1, (2, 3)).patch == (2, 3)
    page = files["page"].read_text(encoding="utf-8")
    assert "data:image/png;base64," in page
    assert '"grids"' in page
    assert re.search(r'"number": ?"the logit of (cat|dog)"', page)
    assert page.count("/pull?kind=self") == 2
    with Image.open(files["figure"]) as drawn:
        assert drawn.width > 500


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nothing.png"], "nothing.png is not a file"),
        ([""], "the image must be a file, or for the model digits a digit; got ''."),
        ([" "], "the image must be a file, or for the model digits a digit; got ' '."),
        (["{place}"], "{place} is a folder: give an image in it"),
        (["{place}/image.png", "--model", ""], "--model must be the name or the folder of a model; got ''."),
        (["3", "--model", "{place}/vit"], "3 is not a file. The digits 0 to 9 are examples of digits: leave out --model."),
        (["99"], "'99' is neither a file nor a digit from 0 to 9"),
        (["{place}/vit/config.json"], "could not be read as an image"),
        (["{place}/image.png", "--model", "{place}/bert"], "reads no images"),
        (["{place}/image.png", "--model", "{place}/none"], "is not a folder"),
        (["{place}/image.png", "--model", "{place}"], "could not be loaded"),
        (["{place}/image.png", "--model", "{place}/vit", "--patch", "3"], "row and column"),
        (["{place}/image.png", "--model", "{place}/vit", "--patch", "6,0"], "row from 0 to 5"),
        (["{place}/image.png", "--model", "{place}/vit", "--head", "7"], "below 2"),
        (["{place}/image.png", "--model", "{place}/vit", "--head", "0.9"], "heads"),
    ],
)
def test_what_cannot_be_used_is_said_in_one_line(capsys, place, arguments, says):
    code, out, err = see(capsys, *(one.format(place=place) for one in arguments))
    assert (code, out) == (2, "")
    assert says.format(place=place) in err
    assert err.count("\n") == 1
