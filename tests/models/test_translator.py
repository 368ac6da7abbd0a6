import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from bounds import assert_within, sum_bound
from models.translators import MADE, make_translator, pad_sentences, sentences
from regard import ConfigError, WeightsError
from regard.models import translator
from regard.text import BytePair

SOURCE, TARGETS = pad_sentences(sentences(7, 2)), torch.tensor([[5, 2], [5, 9]])


def save_model(kind, folder, **other):
    model = make_translator(kind, dtype=torch.float32, **other)
    model.save(folder)
    return model


def change_settings(folder, **settings):
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
    model = save_model(kind, tmp_path / "one", tied=tied)
    again = translator.load(tmp_path / "one")
    assert type(again) is type(model)
    assert not again.training
    assert again.sizes == model.sizes
    assert torch.equal(again(*SOURCE, TARGETS), model(*SOURCE, TARGETS))


@pytest.mark.parametrize("kind", MADE)
def test_in_bytes_every_number_is_within_half_a_step_of_its_row(kind, tmp_path):
    model = make_translator(kind, dtype=torch.float32)
    with torch.no_grad():
        next(model.parameters())[3] = 0  # a row of zeros stays one
    model.save(tmp_path, torch.int8)
    again = translator.load(tmp_path).state_dict()
    for name, weight in model.state_dict().items():
        if weight.dim() == 2:
            step = weight.abs().amax(-1, keepdim=True) / 127
            rounding = sum_bound(torch.float32, 4) * weight.double().abs()  # of a scale, two divisions and a product
            assert_within(again[name], weight, step.double() / 2 + rounding, name)  # and some of them nearly so far
            assert ((again[name] - weight).abs() > step / 4).any(), name
        else:
            assert torch.equal(again[name], weight), name


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (
            lambda found: found.pop("start.weight.scale"),
            r"no start.weight.scale, which the int8 matrix start.weight requires",
        ),
        (
            lambda found: found.update({"start.weight.scale": torch.ones(6)}),
            r"start.weight.scale must have the shape \(7,\), as the int8 matrix start.weight requires; it has \(6,\)",
        ),
        (
            lambda found: found.update({"start.weight.scale": torch.ones(7, dtype=torch.int8)}),
            "start.weight.scale holds torch.int8",
        ),
        (
            lambda found: found["start.weight.scale"][2:].fill_(torch.nan),
            "start.weight.scale must be finite and not below 0; row 2, counted from 0, has nan",
        ),
        (
            lambda found: found["start.weight.scale"][:1].fill_(torch.inf),
            "weight.scale .* row 0, counted from 0, has inf",
        ),
        (lambda found: found["start.weight.scale"][4].neg_(), "start.weight.scale .* row 4, counted from 0, has -"),
        (lambda found: found.update({"start.bias.scale": torch.ones(7)}), "start.bias.scale is not part of the model"),
        (lambda found: found.update({"start.weight": torch.ones(7, 7)}), "start.weight.scale is not part of the model"),
        (lambda found: found.update({"start.bias": torch.ones(7, dtype=torch.int8)}), "start.bias holds torch.int8"),
        (lambda found: found.update({"start.weight": torch.ones(7, 6, dtype=torch.int8)}), r"start.weight must have the shape"),
    ],
)
def test_bytes_without_the_scale_that_they_need_are_refused_by_name(spoil, says, tmp_path):
    make_translator("additive", dtype=torch.float32).save(tmp_path, torch.int8)
    tensors(tmp_path, spoil)
    with pytest.raises(WeightsError, match=says):
        translator.load(tmp_path)


def test_what_cannot_be_stored_is_refused_before_anything_is_written(tmp_path):
    model = make_translator("plain", dtype=torch.float32)
    with pytest.raises(ConfigError, match=r"dtype must be torch.int8, .* got torch.int16"):
        model.save(tmp_path, torch.int16)
    with torch.no_grad():
        model.start.weight[1, 2] = torch.nan
    with pytest.raises(WeightsError, match=r"start.weight holds a number that is not finite"):
        model.save(tmp_path, torch.int8)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (
            lambda folder: change_settings(folder, kind="rnn"),
            r"settings.json has kind='rnn'; expected one of recurrent, transformer",
        ),
        (
            lambda folder: change_settings(folder, sizes={"width": 8}),
            "does not describe a valid recurrent translator: .*vocabulary",
        ),
        (lambda folder: change_settings(folder, sizes=[]), '"sizes" an object'),
        (lambda folder: (folder / "settings.json").write_text("{"), "cannot be read as JSON"),
        (lambda folder: (folder / "settings.json").unlink(), "has no settings.json and is not a translator's name"),
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"12345678"), "is damaged"),
        (lambda folder: tensors(folder, lambda found: found.pop("start.bias")), "has no start.bias"),
        (lambda folder: tensors(folder, lambda found: found.update(more=torch.ones(1))), "more is not part of the model"),
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
    save_model("additive", tmp_path)
    spoil(tmp_path)
    with pytest.raises(WeightsError, match=says):
        translator.load(tmp_path)


def test_a_folder_that_cannot_be_written_is_an_error_and_leaves_nothing(tmp_path):
    (tmp_path / "file").write_text("here")
    with pytest.raises(WeightsError, match="could not be written"):
        make_translator("plain").save(tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_save_that_fails_leaves_the_former_translator_and_its_vocabulary(tmp_path, monkeypatch):
    first, other = make_translator("plain"), make_translator("plain", seed=1)
    first.text, other.text = BytePair.train(["the cat"] * 3, 261), BytePair.train(["a dog sat"] * 3, 261)
    first.save(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    written = []

    def fill_disk(handle):
        written.append(handle)
        if len(written) > 2:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("regard.atomic_write.os.fsync", fill_disk)
    with pytest.raises(WeightsError, match="No space left"):
        other.save(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
