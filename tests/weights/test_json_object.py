import json

import pytest

from regard.errors import WeightsError
from regard.weights import gpt2
from regard.weights.json_object import read_object, read_weight_map
from weights import checkpoint_formats
from weights.damage import attempt

DEEP = "[" * 100_000 + "]" * 100_000
NESTED = "[" * 900 + "]" * 900  # read, but too deep for repr in a deeper call


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", "cannot be read as JSON"),
        ("[1]", r"must be a JSON object, got \[1\]"),
        ('{"a": ' + DEEP + "}", "its objects are nested too deeply"),
        ('{"a": ' + "1" * 5000 + "}", "cannot be read as JSON"),
        ('{"a": "\xff"}', "cannot be read as JSON"),
    ],
)
def test_what_is_no_object_is_refused(tmp_path, content, sentence):
    (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(WeightsError, match=sentence):
        read_object(tmp_path / "config.json")
    (tmp_path / "none").mkdir()
    for path in (tmp_path / "none", tmp_path / "nothing"):
        with pytest.raises(WeightsError, match="cannot be read as JSON"):
            read_object(path)


@pytest.mark.parametrize("places", ["[]", "{}", "5", "null", '{"a": 5}', '{"a": []}', '{"a": null}', '{"a": {"b": "c"}}'])
def test_an_index_that_names_no_files_is_refused(tmp_path, places):
    folder = checkpoint_formats.folder(checkpoint_formats.make_small_gpt2(), tmp_path)
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(f'{{"weight_map": {places}}}')
    with pytest.raises(WeightsError, match=r"weight_map|must name the file of a"):
        read_weight_map(index)
    with pytest.raises(WeightsError, match=r"weight_map|must name the file of a"):
        gpt2.load_weights(folder)


KEYS = ("activation_function", "n_layer", "n_head", "n_embd", "n_inner", "n_positions", "vocab_size", "model_type", "auto_map")
KEYS += ("layer_norm_epsilon", "attn_pdrop", "resid_pdrop", "scale_attn_weights", "pruned_heads", "tie_word_embeddings")


@pytest.mark.slow
@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("value", ["[]", "[[]]", "{}", '{"a": 1}', "0", "-1", "1e400", "NaN", "1.5", "true", '"x"', NESTED])
def test_a_setting_of_a_wrong_type_is_refused_or_means_nothing(tmp_path, key, value):
    folder = checkpoint_formats.folder(checkpoint_formats.make_small_gpt2(), tmp_path)
    expected = gpt2.load_weights(folder).config
    config = json.loads((folder / "config.json").read_text())
    config.pop(key, None)
    (folder / "config.json").write_text(json.dumps(config)[:-1] + f', "{key}": {value}}}')
    found = attempt(lambda: gpt2.load_weights(folder).config)
    assert found in (None, expected)
    if value not in ("[]", "{}", "0", "true"):  # an empty value of a setting that changes nothing, or the value that it has
        assert found is None
