import pickle
import zipfile

import pytest
import torch

from regard.errors import WeightsError
from regard.weights import gpt2, pickles


class Trap:
    def __reduce__(self):
        return (pytest.fail, ("a file was executed",))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_a_pickle_of_anything_but_tensors_is_refused_and_runs_nothing(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(pickle.dumps({"wte.weight": Trap()}))
    with pytest.raises(WeightsError, match="more than plain tensors"):
        gpt2.load_weights(tmp_path)
    torch.save({"wte.weight": Trap()}, path)
    with pytest.raises(WeightsError, match="more than plain tensors"):
        gpt2.load_weights(path)
    torch.save(torch.nn.Linear(2, 3), path)
    with pytest.raises(WeightsError, match="more than plain tensors"):
        gpt2.load_weights(path)
    torch.save([torch.ones(3)], path)
    with pytest.raises(WeightsError, match="must map names to tensors"):
        gpt2.load_weights(path)


@pytest.mark.parametrize("is_zip", [True, False])
def test_tensors_are_those_that_were_saved_whatever_their_layout(tmp_path, is_zip):
    torch.manual_seed(0)
    flat, turned, path = torch.randn(53), torch.randn(7, 11), tmp_path / "m.bin"
    expected = {
        "a": flat[:21].view(3, 7),
        "b": flat[21:],
        "turned": turned.T,
        "sliced": turned[:, 2:5],
        "whole": torch.arange(5),
    }
    expected |= {"brain": torch.randn(5, 3).bfloat16(), "empty": torch.empty(0, 3), "one": torch.tensor(2.5)}
    expected |= {"expanded": torch.randn(3, 1).expand(3, 5), "negative": torch._neg_view(torch.randn(3))}
    torch.save(expected, path, _use_new_zipfile_serialization=is_zip)
    for name, stored in pickles.read_pickle(path)[0].items():
        assert torch.equal(stored.load(), expected.pop(name)), name
    assert not expected
    torch.save({"w": torch.randn(3).to_sparse()}, path, _use_new_zipfile_serialization=is_zip)
    with pytest.raises(WeightsError, match="w must be a dense tensor"):
        pickles.read_pickle(path)


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_changed_bit_is_noticed_and_an_archive_that_was_zipped_again_is_read(tmp_path, compression):
    path, numbers = tmp_path / "m.bin", torch.randn(53)
    torch.save({"w": numbers}, path)
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in sorted(archive.namelist())}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in records.items():
            archive.writestr(name, content)
        at = archive.getinfo(next(name for name in records if name.endswith("data/0"))).header_offset + 80
    assert torch.equal(pickles.read_pickle(path)[0]["w"].load(), numbers)
    content = path.read_bytes()
    path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    with pytest.raises(WeightsError, match="is damaged"):
        pickles.read_pickle(path)


def test_bytes_behind_the_last_number_of_an_old_file_are_refused(tmp_path):
    path = tmp_path / "model.pt"
    torch.save({"wte.weight": torch.ones(3)}, path, _use_new_zipfile_serialization=False)
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(WeightsError, match="bytes follow its last number"):
        pickles.read_pickle(path)
