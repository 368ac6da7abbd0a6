import pytest
import torch
from torch import Tensor

from regard.errors import WeightsError
from regard.weights import gpt2
from weights import checkpoint_formats
from weights.checkpoint_formats import WIDTH, WORDS


def without(name: str):
    return lambda state: {key: x for key, x in state.items() if key != f"transformer.{name}"}


def replace_tensor(name: str, tensor: Tensor):
    return lambda state: state | {f"transformer.{name}": tensor}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (without("h.1.mlp.c_fc.bias"), "has no h.1.mlp.c_fc.bias"),
        (without("wpe.weight"), "wpe.weight must be a matrix; it is missing"),
        (without("h.0.mlp.c_fc.weight"), "h.0.mlp.c_fc.weight must be a matrix; it is missing"),
        (
            replace_tensor("h.2.ln_1.weight", torch.ones(WIDTH)),
            "transformer.h.2.ln_1.weight is not part of a GPT-2 of 2 layers",
        ),
        (replace_tensor("h.0.attn.q_norm.weight", torch.ones(WIDTH)), "q_norm.weight is not part"),
        (replace_tensor("h.1.attn.c_attn.weight", torch.ones(WIDTH, WIDTH)), r"c_attn.weight must have the shape \(15, 45\)"),
        (replace_tensor("h.1.attn.c_attn.weight", torch.ones(45, WIDTH)), r"must have the shape \(15, 45\).*has \(45, 15\)"),
        (replace_tensor("wte.weight", torch.ones(WORDS + 1, WIDTH)), "wte.weight must have the shape"),
        (replace_tensor("h.1.ln_1.bias", torch.ones(WIDTH).int()), "ln_1.bias holds I32"),
        (replace_tensor("h.1.ln_1.bias", torch.ones(WIDTH).to(torch.float8_e4m3fn)), "ln_1.bias holds F8_E4M3"),
        (lambda state: state | {"wte.weight": torch.ones(WORDS, WIDTH)}, "is given twice"),
        (lambda state: state | {"lm_head.weight": torch.ones(WORDS, WIDTH)}, "lm_head.weight differs from"),
        (lambda state: {"a": torch.ones(2)}, "holds a, which are not the names"),
        (lambda state: {}, "holds no tensors, which are not the names"),
    ],
)
def test_a_missing_additional_or_misshapen_tensor_is_named(tmp_path, change, sentence):
    model = checkpoint_formats.make_small_gpt2()
    checkpoint_formats.folder(model, tmp_path, change(checkpoint_formats.tensors(model)))
    with pytest.raises(WeightsError, match=sentence) as refused:
        gpt2.load_weights(tmp_path)
    assert str(tmp_path) in str(refused.value)
