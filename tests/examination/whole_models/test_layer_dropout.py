"""The mean of dropout in the layers of a model is that of evaluation, or the layer is named."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from regard import examine

C, H = 24, 4


class Attention(nn.Module):
    """Causal attention whose weights `drop` changes in training."""

    def __init__(self, drop):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(C, C) for _ in range(4))
        self.drop = drop

    def forward(self, x):
        t = x.shape[1]
        q, k, v = (f(x).unflatten(-1, (H, -1)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        hidden = torch.ones(t, t, dtype=torch.bool).triu(1)
        weights = self.drop((q @ k.mT / (C // H) ** 0.5).masked_fill(hidden, -1e9), self.training)
        return self.o_proj((weights @ v).transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, drop):
        super().__init__()
        self.token, self.place, self.head = nn.Embedding(40, C), nn.Embedding(16, C), nn.Linear(C, 40)
        self.layers = nn.ModuleList(Attention(drop) for _ in range(2))
        self.norms, self.dropout = nn.ModuleList(nn.LayerNorm(C) for _ in range(2)), nn.Dropout(0.2)

    def forward(self, ids):
        x = self.dropout(self.token(ids) + self.place(torch.arange(ids.shape[1])))
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + self.dropout(layer(norm(x)))
        return self.head(x)


def drop_weights(scores, training):
    return F.dropout(scores.softmax(-1), 0.2, training)


def drop_without_dividing(scores, training):
    weights = scores.softmax(-1)
    return weights * (torch.rand_like(weights) > 0.2) if training else weights


def drop_and_divide_by_the_sum(scores, training):
    weights = drop_weights(scores, training)
    return weights / weights.sum(-1, keepdim=True).clamp_min(1e-9)


def drop_scores(scores, training):
    return F.dropout(scores, 0.2, training).softmax(-1)


def drop_nothing(scores, training):
    return scores.softmax(-1)


@pytest.mark.parametrize("drop", [drop_without_dividing, drop_and_divide_by_the_sum, drop_scores])
def test_dropout_with_another_mean_is_named_with_its_layer(drop):
    torch.manual_seed(0)
    (finding,) = examine(Model(drop)).findings
    assert (finding.kind, finding.layer) == ("dropout not rescaled", "layers.0")
    single = "nothing is dropped" if drop is drop_scores else "in training is 0.8"
    assert single in finding.evidence or "in training is 0.79" in finding.evidence


@pytest.mark.parametrize("drop", [drop_weights, drop_nothing])
def test_dropout_with_the_mean_of_evaluation_is_right(drop):
    torch.manual_seed(0)
    report = examine(Model(drop))
    assert report, str(report)
    assert any("mean output with dropout" in one.what for one in report.checked) == (drop is drop_weights)
