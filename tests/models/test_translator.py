import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.translators import MADE, made, padded, sentences
from regard import WeightsError
from regard.models import translator
from regard.text import BytePair
from regard.weights import translators as files

SOURCE, TARGETS = padded(sentences(7, 2)), torch.tensor([[5, 2], [5, 9]])


def saved(kind, folder, **other):
    model = made(kind, dtype=torch.float32, **other)
    model.save(folder)
    return model


def changed(folder, **settings):
    """The folder with other settings."""
    path = folder / "settings.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


def tensors(folder, change):
    """The folder with other tensors."""
    found = load_file(folder / "model.safetensors")
    change(found)
    save_file(found, folder / "model.safetensors")


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("tied", [True, False])
def test_what_was_saved_is_loaded_bit_for_bit(kind, tied, tmp_path):
    model = saved(kind, tmp_path / "one", tied=tied)
    again = translator.load(tmp_path / "one")
    assert type(again) is type(model)
    assert not again.training
    assert again.sizes == model.sizes
    assert torch.equal(again(*SOURCE, TARGETS), model(*SOURCE, TARGETS))


def test_a_file_in_bfloat16_is_half_as_large_and_loaded_in_float32(tmp_path):
    model = saved("additive", tmp_path / "whole")
    model.bfloat16().save(tmp_path / "half")
    again = translator.load(tmp_path / "half")
    assert {weight.dtype for weight in again.parameters()} == {torch.float32}
    assert {weight.dtype for weight in translator.load(tmp_path / "half", torch.float64).parameters()} == {torch.float64}
    for name, weight in again.state_dict().items():
        assert torch.equal(weight, model.state_dict()[name].float())
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("whole", "half")]
    assert sizes[1] < 0.6 * sizes[0] + 2000


def test_the_text_lies_beside_the_weights(tmp_path):
    model = made("plain", dtype=torch.float32)
    assert not hasattr(translator.load(written(model, tmp_path / "silent")).text, "encode")
    model.text = BytePair.train(["le chat, le chat et le chien"], 270)
    again = translator.load(written(model, tmp_path / "speaking"))
    assert again.text.encode("le chat") == model.text.encode("le chat")
    assert again.text.end == model.text.end


def written(model, folder):
    model.save(folder)
    return folder


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda folder: changed(folder, kind="rnn"), r"settings.json says kind='rnn'; there is recurrent, transformer"),
        (lambda folder: changed(folder, sizes={"width": 8}), "describes no recurrent translator: .*vocabulary"),
        (lambda folder: changed(folder, sizes=[]), '"sizes" an object'),
        (lambda folder: (folder / "settings.json").write_text("{"), "must be a JSON object"),
        (lambda folder: (folder / "settings.json").unlink(), "has no settings.json, and is no translator's name"),
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"12345678"), "is damaged"),
        (lambda folder: tensors(folder, lambda found: found.pop("start.bias")), "has no start.bias"),
        (lambda folder: tensors(folder, lambda found: found.update(more=torch.ones(1))), "more is no part of the model"),
        (
            lambda folder: tensors(folder, lambda found: found.update({"start.bias": torch.ones(3)})),
            r"start.bias must have the shape \(7,\), .* it has \(3,\)",
        ),
        (
            lambda folder: tensors(folder, lambda found: found.update({"start.bias": torch.ones(7, dtype=torch.int32)})),
            "start.bias holds .*I32",
        ),
    ],
)
def test_a_folder_that_is_spoilt_is_refused_by_name(spoil, says, tmp_path):
    saved("additive", tmp_path)
    spoil(tmp_path)
    with pytest.raises(WeightsError, match=says):
        translator.load(tmp_path)


def test_a_name_that_is_none_says_which_there_are():
    with pytest.raises(WeightsError, match="no translator's name: those are translator, translator-plain"):
        translator.load("interpreter")
    assert set(files.CARRIED) == {"translator", "translator-plain"}


def test_a_folder_that_cannot_be_written_is_an_error_and_leaves_nothing(tmp_path):
    (tmp_path / "file").write_text("here")
    with pytest.raises(WeightsError, match="could not be written"):
        made("plain").save(tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
