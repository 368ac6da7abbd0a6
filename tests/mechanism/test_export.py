"""Exported and traced programs compute the attention of any length, and of shared heads, that eager code computes."""

import pytest
import torch

from regard import GPT2, Causal, Everything, GPT2Config, MultiHeadAttention, Padding, Prefix, Window, attention

B, H, G, D = 2, 4, 2, 8
REQUESTS = {
    "everything": {"mask": Everything()},
    "causal": {"mask": Causal()},
    "negative scale": {"mask": Causal(), "scale": -0.3},
    "window": {"mask": Causal() & Window(4)},
    "prefix": {"mask": Causal() | Prefix(2)},
    "padding": {"mask": Padding([5, 9])},
    "softcap": {"softcap": 2.0},
    "sinks": {"mask": Causal(), "sinks": torch.linspace(-1, 1, H)},
    "offsets": {"mask": Causal(), "offset": torch.tensor([0, 1])},
    "bias": {"mask": Causal(), "bias": torch.linspace(-1, 1, H).view(H, 1, 1)},
}


def make_qkv(t: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(t)
    return tuple(torch.randn(B, heads, t, D, generator=generator) for heads in (H, G, G))


class Attention(torch.nn.Module):
    def __init__(self, options):
        super().__init__()
        self.options = options

    def forward(self, q, k, v):
        return attention(q, k, v, **self.options)


@pytest.mark.parametrize("name", REQUESTS)
def test_an_exported_program_takes_any_length(name):
    t = torch.export.Dim("t", min=2, max=300)
    program = torch.export.export(Attention(REQUESTS[name]), make_qkv(9), dynamic_shapes=({2: t}, {2: t}, {2: t})).module()
    for length in (5, 40, 300):
        q, k, v = make_qkv(length)
        torch.testing.assert_close(program(q, k, v), attention(q, k, v, **REQUESTS[name]))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", REQUESTS)
def test_a_traced_program_takes_shared_heads(name):
    traced = torch.jit.trace(Attention(REQUESTS[name]), make_qkv(9))
    q, k, v = (2 * x for x in make_qkv(9))
    torch.testing.assert_close(traced(q, k, v), attention(q, k, v, **REQUESTS[name]))


@pytest.mark.parametrize(
    ("model", "make_input"),
    [
        (MultiHeadAttention(12, 12, 64, 0.0, 3), lambda b, t: torch.randn(b, t, 12)),
        (GPT2(GPT2Config(2, 2, 16, 64, 50)), lambda b, t: torch.randint(0, 50, (b, t))),
    ],
    ids=["MultiHeadAttention", "GPT2"],
)
def test_an_exported_model_takes_any_batch_and_length(model, make_input):
    sizes = {0: torch.export.Dim("b", min=1, max=8), 1: torch.export.Dim("t", min=2, max=64)}
    program = torch.export.export(model.eval(), (make_input(2, 9),), dynamic_shapes=(sizes,)).module()
    for b, t in ((1, 5), (3, 64)):
        x = make_input(b, t)
        torch.testing.assert_close(program(x), model(x))
