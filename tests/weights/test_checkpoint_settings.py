import pytest
import torch

from regard.errors import WeightsError
from regard.weights import gpt2
from weights import checkpoint_formats


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ({"activation_function": "quick_gelu"}, "activation_function='quick_gelu'"),
        ({"scale_attn_weights": False}, "scale_attn_weights=False"),
        ({"scale_attn_by_inverse_layer_idx": True}, "inverse_layer_idx=True"),
        ({"add_cross_attention": True}, "add_cross_attention=True"),
        ({"model_type": "llama"}, "model_type='llama'"),
        ({"pruned_heads": {"0": [1]}}, "pruned_heads"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"auto_map": {"AutoModel": "x.py"}}, "auto_map"),
        ({"attn_pdrop": 0.2}, "one dropout for three places"),
        ({"embd_pdrop": 2.0}, "a probability is from 0"),
        ({"layer_norm_epsilon": 0}, "layer_norm_epsilon=0"),
        ({"n_head": 4}, "not a multiple of the 4 heads"),
        ({"n_head": -3}, "n_head=-3; it must be a whole number"),
        ({"n_layer": "2"}, "n_layer='2'"),
        ({"n_layer": 3}, "has no h.2.ln_1.weight"),
        ({"n_layer": 10**12}, "has no h.2.ln_1.weight"),
        ({"n_layer": 1}, r"h\.1\.\S+ is not part of a GPT-2 of 1 layers"),
        ({"n_positions": 18}, "wpe.weight must have the shape"),
        ({"n_inner": 59}, "c_fc.weight must have the shape"),
        ({"hidden_size": 18}, "must be equal"),
        ({"tie_word_embeddings": False}, "has no lm_head.weight"),
        ({"tie_word_embeddings": "no"}, "must be true or false"),
    ],
)
def test_a_config_that_says_something_else_is_refused(tmp_path, said, sentence):
    with pytest.raises(WeightsError, match=sentence):
        gpt2.load_weights(checkpoint_formats.folder(checkpoint_formats.make_small_gpt2(), tmp_path, **said))


@pytest.mark.parametrize(("width", "heads"), [(15, 3), (128, 4), (128, 2)])
def test_the_heads_of_another_width_must_be_said(tmp_path, width, heads):
    torch.save(
        {"model": checkpoint_formats.linear(checkpoint_formats.make_small_gpt2(n_embd=width, n_head=heads))}, tmp_path / "m.pt"
    )
    with pytest.raises(WeightsError, match="does not state the number of heads"):
        gpt2.load_weights(tmp_path / "m.pt")
