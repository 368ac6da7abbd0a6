import pickle
import re

import pytest
import torch

from regard.errors import WeightsError
from regard.weights import gpt2


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


def test_an_old_file_whose_list_of_storages_is_damaged_is_refused(tmp_path):
    path = tmp_path / "model.pt"
    torch.save({"wte.weight": torch.ones(3)}, path, _use_new_zipfile_serialization=False)
    content = path.read_bytes()
    place = [found.end() - 1 for found in re.finditer(rb"\d{8,}", content)][-1]  # the list stands last
    path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    with pytest.raises(WeightsError, match="is damaged"):
        gpt2.load_weights(path)
