"""Recordings whose q and k a test knows, and words for them: plain ones, and those that break pages."""

import torch
from torch import Tensor
from torch.nn import functional

import regard
from regard.mechanism import Causal

PLAIN = [
    "the",
    "cat",
    "sat",
    "on",
    "the",
    "mat",
    "because",
    "it",
    "was",
    "warm",
    "and",
    "the",
    "dog",
    "lay",
    "by",
    "the",
    "fire",
]
EVIL = [
    "</script>",
    "<img src=x onerror=alert(1)>",
    "\u202eright",
    "a\x00b",
    " ",
    "\n",
    "'\"&",
    "é" * 500,
    "日本",
    "\t",
    "{{x}}",
]


class Fixed(torch.nn.Module):
    """Attention over a q and a k that are given, with v random; layers of it are run one after the other."""

    def __init__(self, q: Tensor, k: Tensor) -> None:
        super().__init__()
        self.register_buffer("q", q)
        self.register_buffer("k", k)
        self.register_buffer("v", torch.randn(k.shape, generator=torch.Generator().manual_seed(1)))

    def forward(self) -> Tensor:
        return functional.scaled_dot_product_attention(self.q, self.k, self.v, is_causal=True)


class Layers(torch.nn.Module):
    """Several of them."""

    def __init__(self, q: Tensor, k: Tensor) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Fixed(*pair) for pair in zip(q, k, strict=True))

    def forward(self) -> None:
        for layer in self.layers:
            layer()


def some(layers: int, heads: int, tokens: int, width: int = 11, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random q and k (layer, b, h, t, d), strong enough that rows differ."""
    generator = torch.Generator().manual_seed(seed)
    q, k = (1.7 * torch.randn(layers, 1, heads, tokens, width, generator=generator) for _ in range(2))
    return q, k


def recorded(q: Tensor, k: Tensor, words: list[str]) -> regard.Recording:
    """The recording of layers that attend with exactly this q and k, causally."""
    model = Layers(q, k).eval()
    with regard.record(model) as recording, torch.no_grad():
        model()
    recording.tokens = words
    return recording


def weights(q: Tensor, k: Tensor, layer: int, head: int) -> Tensor:
    """What attend gives for a head, (q, k), in float64."""
    one = q[layer, 0, head].double(), k[layer, 0, head].double()
    return regard.attend(*one, one[1], Causal()).weights


def spaced(words: list[str], count: int) -> list[str]:
    """So many words, with the spaces of a text before them."""
    return [(" " if n else "") + words[n % len(words)] for n in range(count)]
