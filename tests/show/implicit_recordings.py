"""Recordings of layers without a softmax, alone and beside others."""

import numpy as np
import tokenizers
import torch
from torch.nn.functional import scaled_dot_product_attention, silu
from transformers import PreTrainedTokenizerFast

import regard
from observe.recurrent_models import RECURRENT, WORDS
from regard.cli.model_loading import TransformersModel

B, H, D = 2, 3, 5


class SiluAttention(torch.nn.Module):
    """Weights that are the silu of scores: signed, and of any sum."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (torch.nn.Linear(H * D, H * D) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part(x).unflatten(-1, (H, D)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return (silu(q @ k.mT) @ v).transpose(1, 2).flatten(2)


class SoftmaxAttention(SiluAttention):
    """Weights that are a softmax."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part(x).unflatten(-1, (H, D)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def record_spread(tokens: int) -> regard.Recording:
    """A recording of one layer whose entries are spread over many decades, most of them small."""
    torch.manual_seed(0)
    model = SiluAttention().double()
    with torch.no_grad(), regard.record(model) as recording:
        for part in (model.q, model.k):
            part.bias.zero_()
        sizes = 10 ** (-8 * torch.rand(1, tokens, 1, dtype=torch.float64))
        model(sizes * torch.randn(1, tokens, H * D, dtype=torch.float64))
    recording.tokens = [f" a{n}" for n in range(tokens)]
    return recording


def record_implicit(tokens: int, *kinds: type[torch.nn.Module], batch: int = B) -> regard.Recording:
    """A recording of layers in a row, in float64, with words for each batch row."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(kind() for kind in kinds)).double().eval()
    with torch.no_grad(), regard.record(model) as recording:
        model(2 * torch.randn(batch, tokens, H * D, dtype=torch.float64))
    recording.tokens = [[f" {row}{n}" for n in range(tokens)] for row in "ab"[:batch]]
    recording.model = "mixed"
    return recording


def make_mamba_adapter() -> TransformersModel:
    """Return a small random Mamba-2 of transformers with a vocabulary of words, as the page runs it."""
    words = {"<s>": 0, **{f"w{n}": n for n in range(1, WORDS)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<s>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    model = next(one for one in RECURRENT if one.name == "mamba2").build()
    return TransformersModel("mamba2", model, PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>"))


def pool_signed(matrix: torch.Tensor, rows: int, columns: int, how: str) -> torch.Tensor:
    """The signed mean of each bin of a matrix (q, k), or its entry that is largest in size, by numpy in float64."""
    starts = [[n * size // bins for n in range(bins)] for size, bins in zip(matrix.shape, (rows, columns), strict=True)]

    def reduce(function: np.ufunc, entries: torch.Tensor) -> torch.Tensor:
        reduced = function.reduceat(entries.double().numpy(), starts[0])
        return torch.from_numpy(function.reduceat(reduced, starts[1], axis=1))

    if how == "mean":
        return reduce(np.add, matrix) / reduce(np.add, torch.ones_like(matrix))
    largest, smallest = reduce(np.maximum, matrix), reduce(np.minimum, matrix)
    return torch.where(largest >= -smallest, largest, smallest)
