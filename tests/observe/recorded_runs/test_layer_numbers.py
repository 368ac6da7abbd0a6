"""The kind of attention that the path of a module states."""

import pytest

from regard.observe.recorded_runs.layer_numbers import infer_kind_from_path

KINDS = {
    "decoder.layers.0.encoder_attn": "cross",
    "decoder.layers.0.multihead_attn": "cross",
    "encoder.layer.0.crossattention.self": "cross",
    "encoder.cross_attention.attention.self": "cross",  # Perceiver
    "encoder.layer.0.attention.self": None,  # of BERT, and of cross attention that is built like it, as SuperGlue's
    "layers.0.self_attention.attention.self": "self",
    "crossencoder.encoder.layer.0.attention.self": None,  # the model's name says nothing about a layer
    "cross.layers.0.attn": None,
    "layers.0.self_attn": "self",
    "h.0.attn": None,
}


@pytest.mark.parametrize("path", KINDS)
def test_the_last_components_of_a_path_state_the_kind(path):
    assert infer_kind_from_path(path) == KINDS[path]
