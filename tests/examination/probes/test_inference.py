"""A mask of numbers that torch's fast path reads otherwise in inference is found, whatever way a module is called."""

import pytest
import torch
from torch import nn

from regard.examination.probes.inference import check_inference

T, C = 5, 8


class Encoder(nn.Module):
    """An encoder of torch with a mask of its own."""

    def __init__(self, mask, padding=None):
        super().__init__()
        layer = nn.TransformerEncoderLayer(C, 2, 8, dropout=0.0, batch_first=True)
        self.encoder, self.given = nn.TransformerEncoder(layer, 2), {"mask": mask, "src_key_padding_mask": padding}

    def forward(self, x):
        return self.encoder(x, **self.given)


DISTANCES = -0.5 * (torch.arange(T) - torch.arange(T)[:, None]).abs()
CAUSAL = nn.Transformer.generate_square_subsequent_mask(T)
PADS = torch.zeros(2, T).index_fill(1, torch.tensor(T - 1), 1.0)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize(
    ("mask", "padding", "evidence"),
    [
        (DISTANCES, None, "query 0 does not see token 1, to whose score the mask adds -0.5"),
        (DISTANCES + CAUSAL, None, "query 1 does not see token 0, to whose score the mask adds -0.5"),
        (None, -3 * PADS, "of sequence 0 no query does see token 4, to whose score the mask adds -3"),
        (CAUSAL, None, ""),
        (CAUSAL.clamp(-1e9), None, ""),
        (CAUSAL < 0, PADS.bool(), ""),
        (None, None, ""),
    ],
)
def test_the_finding_is_there_where_the_outputs_of_inference_differ(mask, padding, evidence):
    torch.manual_seed(0)
    model, x = Encoder(mask, padding).eval(), torch.randn(2, T, C)
    findings = list(check_inference(model, lambda: model(x)))
    with torch.no_grad():
        fast = model(x)
    real = slice(T if padding is None else T - 1)  # a nested tensor leaves out the rest
    assert (float((model(x).detach() - fast)[:, real].abs().max()) > 1e-4) == bool(evidence)  # gradients disable the fast path
    assert [(one.kind, one.layer) for one in findings] == [("wrong mask", "encoder.layers.0.self_attn")] * bool(evidence)
    assert all(evidence in one.evidence for one in findings)
