import contextlib
import json
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from regard.errors import WeightsError
from regard.weights import gpt2
from weights import checkpoint_formats
from weights.checkpoint_formats import FORMATS, LAYERS, WIDTH, WORDS


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({}, "must hold model.safetensors.*none of these"),
        ({"a.npz": b"", "b.pt": b""}, "it holds a.npz, b.pt"),
        ({"model.safetensors": b"junk"}, "model.safetensors is damaged"),
        ({"pytorch_model.bin": b"junk"}, "pytorch_model.bin is"),
        ({"m.npz": b"junk"}, "m.npz is damaged"),
        ({"model.safetensors.index.json": b"{}"}, 'index.json must have "weight_map"'),
        (
            {"model.safetensors.index.json": b'{"weight_map": {"a": "../x.safetensors"}}'},
            "names '../x.safetensors'",
        ),
        (
            {"model.safetensors.index.json": b'{"weight_map": {"a": "x.safetensors"}}'},
            "names 'x.safetensors'",
        ),
        ({"model.safetensors": None, "config.json": b"{"}, "config.json cannot be read as JSON"),
        ({"model.safetensors": None, "config.json": b"[]"}, "config.json must be a JSON object"),
    ],
)
def test_a_folder_without_a_model_is_refused(tmp_path, files, sentence):
    whole = checkpoint_formats.folder(checkpoint_formats.make_small_gpt2(), tmp_path / "whole") / "model.safetensors"
    (tmp_path / "model").mkdir()
    for name, content in files.items():
        (tmp_path / "model" / name).write_bytes(whole.read_bytes() if content is None else content)
    with pytest.raises(WeightsError, match=sentence):
        gpt2.load_weights(tmp_path / "model")


def test_the_index_of_several_files_must_agree_with_them(tmp_path):
    checkpoint_formats.write_shards(checkpoint_formats.make_small_gpt2(), tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    moved = places | {"transformer.wpe.weight": places["transformer.ln_f.bias"]}
    assert moved != places
    index.write_text(json.dumps({"weight_map": moved}))
    with pytest.raises(WeightsError, match=r"has no transformer\.wpe\.weight, which model\.safetensors\.index\.json lists"):
        gpt2.load_weights(tmp_path)
    del places["transformer.ln_f.bias"]
    index.write_text(json.dumps({"weight_map": places}))
    with pytest.raises(WeightsError, match=r"transformer\.ln_f\.bias is not in"):
        gpt2.load_weights(tmp_path)


@pytest.fixture(scope="module")
def originals(tmp_path_factory) -> dict[str, Path]:
    """A folder of each format, from which the tests of damage copy."""
    root, model = tmp_path_factory.mktemp("originals"), checkpoint_formats.make_small_gpt2()
    return {kind: write(model, root / kind.replace(" ", "-")) for kind, write in FORMATS.items()}


@settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_is_refused_or_harmless_and_never_anything_else(tmp_path, originals, data):
    kind = data.draw(st.sampled_from(sorted(originals)))
    shutil.rmtree(tmp_path)
    shutil.copytree(originals[kind], tmp_path)
    file = data.draw(st.sampled_from(sorted(path for path in tmp_path.iterdir() if path.suffix != ".json")))
    content = bytearray(file.read_bytes())
    most = min(2000, len(content)) if data.draw(st.booleans()) else len(content)  # names and shapes stand at the front
    for _ in range(data.draw(st.integers(0, 3))):
        content[data.draw(st.integers(0, most - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(content[: data.draw(st.one_of(st.none(), st.integers(0, len(content))))])
    with contextlib.suppress(WeightsError):
        found = gpt2.load_weights(tmp_path)
        assert (found.config["layers"], found.config["width"], found.config["vocabulary"]) == (LAYERS, WIDTH, WORDS)
