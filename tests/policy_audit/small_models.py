"""Small causal models whose attention is recorded with its values, in float64."""

import torch

import regard
from regard.models import GPT2, GPT2Config

LAYERS, HEADS, TOKENS, PROMPT, VOCABULARY = 2, 3, 41, 23, 29


def make_model(seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    model = GPT2(GPT2Config(layers=LAYERS, heads=HEADS, width=15, context=64, vocabulary=VOCABULARY)).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.dim() > 1 else 1)  # weights that are far from uniform
    return model


def draw_tokens(batch=2, tokens=TOKENS, seed=1):
    return torch.randint(VOCABULARY, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def record(model, tokens, keep="values"):
    with regard.record(model, keep=keep) as recording, torch.no_grad():
        model(tokens)
    return recording


class Layer(torch.nn.Module):
    """One layer of attention on given q, k and v."""

    def __init__(self, q, k, v, **settings):
        super().__init__()
        self.q, self.k, self.v, self.settings = q, k, v, settings

    def forward(self):
        return regard.attention(
            self.q,
            self.k,
            self.v,
            self.settings.get("mask", regard.Causal()),
            **{name: value for name, value in self.settings.items() if name != "mask"},
        )


def record_layer(q, k, v, **settings):
    with regard.record(layer := Layer(q, k, v, **settings), keep="values") as recording:
        layer()
    return recording
