import pytest
import torch

from regard.errors import WeightsError
from regard.weights import gpt2
from weights import written


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
        ({"attn_pdrop": 0.2}, "one dropout for its three places"),
        ({"embd_pdrop": 2.0}, "a probability is from 0"),
        ({"layer_norm_epsilon": 0}, "layer_norm_epsilon=0"),
        ({"n_head": 4}, "no multiple of the 4 heads"),
        ({"n_head": -3}, "n_head=-3; it must be a whole number"),
        ({"n_layer": "2"}, "n_layer='2'"),
        ({"n_layer": 3}, "has no h.2.ln_1.weight"),
        ({"n_layer": 10**12}, "has no h.2.ln_1.weight"),
        ({"n_layer": 1}, r"h\.1\.\S+ is no part of a GPT-2 of 1 layers"),
        ({"n_positions": 18}, "wpe.weight must have the shape"),
        ({"n_inner": 59}, "c_fc.weight must have the shape"),
        ({"hidden_size": 18}, "are the same thing"),
        ({"tie_word_embeddings": False}, "has no lm_head.weight"),
        ({"tie_word_embeddings": "no"}, "must be true or false"),
    ],
)
def test_a_config_that_says_something_else_is_refused(tmp_path, said, sentence):
    with pytest.raises(WeightsError, match=sentence):
        gpt2.load(written.folder(written.small(), tmp_path, **said))


def test_a_setting_that_a_checkpoint_of_another_model_says_is_refused(tmp_path):
    with pytest.raises(WeightsError, match="use_rmsnorm=True"):
        gpt2.load(written.nanogpt(written.small(), tmp_path, use_rmsnorm=True))


def test_the_heads_of_a_released_width_are_known(tmp_path):
    model = written.small(n_embd=128, n_head=2)
    torch.save({"model": written.linear(model)}, tmp_path / "m.pt")
    assert gpt2.load(tmp_path / "m.pt").config["heads"] == 2
    torch.save({"model": written.linear(written.small())}, tmp_path / "m.pt")
    with pytest.raises(WeightsError, match="does not say how many heads"):
        gpt2.load(tmp_path / "m.pt")
