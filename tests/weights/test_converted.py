"""A .gguf file is converted once: the second time its weights are read as they were saved, unless one byte differs."""

import os

import pytest
import torch

from regard.cli.model_loading import CAUSAL_LM, load_model
from regard.weights import converted
from regard.weights.converted import clear_cache, count_bytes, describe_cache, find_cache_folder, is_whole, remove_oldest
from weights import gguf_files

gguf = pytest.importorskip("gguf", reason="needs gguf, with which transformers reads .gguf")
pytest.importorskip("accelerate", reason="needs accelerate, with which transformers reads .gguf")


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path / "cache"))
    gguf_files.write(tmp_path / "m.gguf")
    return tmp_path / "m.gguf"


def read_all(path):
    """The weights of a model, its configuration without its place, and the tokens of a text."""
    model = load_model(str(path), CAUSAL_LM)
    state = {name: x.clone() for name, x in model.model.state_dict().items()}
    return state, model.model.config.to_dict() | {"_name_or_path": ""}, model.tokens("hello  world", None)[1]


def refuse(*_):
    raise AssertionError("the file was converted again")


def test_the_second_time_nothing_is_converted_and_every_bit_is_the_same(path, monkeypatch):
    first = read_all(path)
    monkeypatch.setattr(gguf, "GGUFReader", refuse)
    second = read_all(path)
    assert first[0].keys() == second[0].keys()
    assert all(torch.equal(first[0][name], second[0][name]) for name in first[0])
    assert first[1:] == second[1:]


def test_what_was_changed_on_the_disk_is_converted_again(path):
    first, (place,) = read_all(path), find_cache_folder().iterdir()
    weights = place / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert not is_whole(place)
    assert not place.exists()
    assert all(torch.equal(x, read_all(path)[0][name]) for name, x in first[0].items())


def test_another_file_of_the_same_name_is_another_model(path):
    first = read_all(path)[0]
    content = bytearray(path.read_bytes())
    content[-1] ^= 0x40
    path.write_bytes(content)
    assert any(not torch.equal(x, read_all(path)[0][name]) for name, x in first.items())


def test_a_folder_that_takes_nothing_and_a_model_that_is_too_large_are_no_errors(path, tmp_path, monkeypatch):
    monkeypatch.setattr(converted, "MAX_CACHE_BYTES", 1)
    read_all(path)
    assert not find_cache_folder().exists()
    (tmp_path / "file").touch()
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path / "file"))
    read_all(path)


def test_the_models_used_longest_ago_are_removed_first_and_all_when_the_cache_is_cleared(path):
    read_all(path)
    (place,) = find_cache_folder().iterdir()
    newer = place.rename(place.with_name("newer"))
    read_all(path)
    os.utime(place, (0, 0))
    remove_oldest(find_cache_folder(), count_bytes(newer) + 1)
    assert list(find_cache_folder().iterdir()) == [newer]
    assert describe_cache().startswith("1 converted model, 0.0 GB, in ")
    clear_cache()
    assert describe_cache().startswith("0 converted models")
