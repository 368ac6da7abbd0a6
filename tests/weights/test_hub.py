"""The hub without a network: a cache that holds a model, and one that holds none, each seen by a new Python."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from regard.weights import hub
from weights import checkpoint_formats

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LOAD = """
import sys
from regard.errors import WeightsError
from regard.weights import gpt2
try:
    print(gpt2.load_weights(sys.argv[1]).folder)
except WeightsError as error:
    print("WeightsError:", error)
"""


def load_in_new_python(name: str, home: Path, code: str = LOAD) -> str:
    environment = {**os.environ, "HF_HOME": str(home), "HF_HUB_CACHE": str(home / "hub"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", code, name]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, cwd=home)
    return ran.stdout.strip()


def snapshot(home: Path, repository: str) -> Path:
    """A folder of the cache, empty yet."""
    root = home / "hub" / f"models--{repository.replace('/', '--')}"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text(COMMIT)
    return root / "snapshots" / COMMIT


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "repository", "write"),
    [
        ("gpt2", "openai-community/gpt2", checkpoint_formats.folder),
        ("gpt2", "gpt2", checkpoint_formats.write_shards),
        ("someone/their-model", "someone/their-model", checkpoint_formats.write_pickle),
    ],
)
def test_a_model_in_the_cache_is_loaded_without_a_network(tmp_path, name, repository, write):
    place = snapshot(tmp_path, repository)
    write(checkpoint_formats.make_small_gpt2(), place)
    (place / "vocab.json").write_text("{}")
    assert load_in_new_python(name, tmp_path) == str(place)


@pytest.mark.slow
def test_a_model_that_is_not_there_gives_the_command_to_fetch_it(tmp_path):
    said = load_in_new_python("gpt2-medium", tmp_path)
    assert said.startswith(
        "WeightsError: gpt2-medium is not a local file and not in the hub's cache, and the hub cannot be reached."
    )
    for word in ("config.json", "model.safetensors", "vocab.json", "merges.txt", "into a folder"):
        assert word in said
    assert "https://huggingface.co/openai-community/gpt2-medium" in said
    assert "https://huggingface.co/someone/model " in load_in_new_python("someone/model", tmp_path)


@pytest.mark.slow
def test_a_model_of_which_the_cache_holds_half_gives_the_command_to_fetch_it(tmp_path):
    place = checkpoint_formats.write_shards(checkpoint_formats.make_small_gpt2(), snapshot(tmp_path, "gpt2"))
    sorted(place.glob("model-*.safetensors"))[1].unlink()
    assert "the hub cannot be reached" in load_in_new_python("gpt2", tmp_path)


@pytest.mark.slow
def test_without_the_hubs_library_the_sentence_names_it(tmp_path):
    said = load_in_new_python("gpt2", tmp_path, "import sys; sys.modules['huggingface_hub'] = None\n" + LOAD)
    assert 'or: pip install "regard[hub]"' in said


@pytest.mark.parametrize("name", ["gpt2", "gpt2-xl", "owner/model", "owner/model-1.5b_x"])
def test_these_are_names(name):
    assert hub.is_model_name(name)


@pytest.mark.parametrize("name", ["gpt3", "/etc/passwd", "./model", "a/b/c", "owner/", "~/model", "../x", "owner/model\n"])
def test_these_are_none(name):
    assert not hub.is_model_name(name)
