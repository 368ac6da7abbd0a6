import subprocess
import sys

import pytest
import torch
from torch import nn

from regard.models import GPT2, GPT2Config
from regard.weights.meta_modules import create_on_meta


def test_modules_have_their_shapes_and_no_numbers():
    with create_on_meta():
        model = GPT2(GPT2Config(layers=2, heads=3, width=15, context=17, vocabulary=53))
        other = nn.Sequential(nn.GRU(5, 7), nn.Embedding(11, 5), nn.LayerNorm(5))
    assert {weight.device.type for module in (model, other) for weight in module.parameters()} == {"meta"}
    assert model.tokens.weight.shape == (53, 15)
    assert nn.init.normal_(torch.zeros(7)).any()  # outside of it as ever


@pytest.mark.slow
def test_loading_a_model_does_not_import_the_compiler_of_torch():
    code = "import sys; from regard import GPT2; GPT2.load('pocket'); print('sympy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
