"""Recordings whose q and k a test knows, and words for them: plain ones, and those that break pages."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import regard
from bounds import attention_bounds
from regard.map.codes import OCTAVE
from regard.mechanism import Causal

CODE = 2 ** (0.504 / OCTAVE) - 1  # relative: half a code, and the last bit of one in float32

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


def draw_queries_and_keys(layers: int, heads: int, tokens: int, width: int = 11, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random q and k (layer, b, h, t, d), strong enough that rows differ."""
    generator = torch.Generator().manual_seed(seed)
    q, k = (1.7 * torch.randn(layers, 1, heads, tokens, width, generator=generator) for _ in range(2))
    return q, k


def record_layers(q: Tensor, k: Tensor, words: list[str] | None = None) -> regard.Recording:
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


def weight_bounds(q: Tensor, k: Tensor, layer: int, head: int) -> Tensor:
    """How far the weights of a head, (q, k), may lie from those of attend where they are computed in float32."""
    exact = weights(q, k, layer, head)[None, None]
    return attention_bounds(torch.float32, q[layer, :, head, None], *[k[layer, :, head, None]] * 2, exact).weights[0, 0]


def code_bounds(q: Tensor, k: Tensor, layer: int, head: int) -> Tensor:
    """The same of weights that travel as codes."""
    return weight_bounds(q, k, layer, head) + CODE * weights(q, k, layer, head)


def expect_weight(q: Tensor, k: Tensor, layer: int, head: int, row: int, column: int):
    """What the page may tell, to all digits, of a weight that is computed in float32."""
    exact, allowed = (found(q, k, layer, head)[row, column] for found in (weights, weight_bounds))
    return pytest.approx(float(exact), abs=float(allowed))


def expect_digits(exact: Tensor | float, allowed: Tensor | float = 0.0):
    """What three digits may tell of a number that is off by so much before it is written: half a unit of the last is lost."""
    number = float(exact)
    unit = 10.0 ** (math.floor(math.log10(abs(number))) - 2) if number and math.isfinite(number) else 0.0
    return pytest.approx(number, abs=0.501 * unit + float(allowed), nan_ok=True)


def space_words(words: list[str], count: int) -> list[str]:
    """So many words, with the spaces of a text before them."""
    return [(" " if n else "") + words[n % len(words)] for n in range(count)]
