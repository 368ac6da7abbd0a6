"""What both kinds of translators share: the vocabulary, and sentences of unequal length in one tensor with their padding."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from regard.errors import ShapeError
from regard.matmul import Linear, linear
from regard.mechanism import EVERYTHING, Mask, Padding

Lengths = tuple[int, ...]


def check_lengths(sources: Tensor, lengths: Tensor | Sequence[int], context: int | None = None) -> Lengths:
    """Return the number of tokens of each source (b, s), from 1 to s; raise ShapeError if lengths and sources do not fit."""
    check_token_matrix("sources", sources, context)
    found = tuple(lengths.tolist() if isinstance(lengths, Tensor) else lengths)
    if len(found) != len(sources) or not all(isinstance(n, int) and 1 <= n <= sources.shape[1] for n in found):
        raise ShapeError(
            f"lengths must be (b,), {len(sources)} whole numbers from 1 to {sources.shape[1]}, one per source; got {found}."
        )
    return found


def check_token_matrix(name: str, tokens: Tensor, context: int | None = None) -> None:
    """Raise ShapeError if tokens are not integers (b, t), or t is larger than the context."""
    letters = "b, s" if name == "sources" else "b, t"
    if tokens.dim() != 2 or tokens.is_floating_point() or tokens.dtype == torch.bool or not tokens.numel():
        raise ShapeError(f"{name} must be whole numbers ({letters}), at least one; got {tokens.dtype} {tuple(tokens.shape)}.")
    if context is not None and tokens.shape[1] > context:
        raise ShapeError(f"{name} have {tokens.shape[1]} tokens, but the model's context is {context}.")


def make_padding_mask(lengths: Lengths, s: int) -> Mask:
    """Return the mask that hides the padding of sources s tokens long, or EVERYTHING if there is none."""
    return EVERYTHING if min(lengths) == s else Padding(lengths)


class Vocabulary(nn.Module):
    """Embeddings of source and target, and the matrix that turns a vector into logits: one matrix for all if tied, else three.

    An embedding is multiplied by √width, so that numbers small enough for logits are large enough as inputs.
    Source: Vaswani et al. 2017, section 3.4, after Press and Wolf 2017.
    """

    def __init__(self, vocabulary: int, width: int, tied: bool) -> None:
        super().__init__()
        self.scale = math.sqrt(width)
        self.words = nn.Embedding(vocabulary, width)
        self.targets = None if tied else nn.Embedding(vocabulary, width)
        self.head = None if tied else Linear(width, vocabulary, bias=False)
        for weight in self.parameters():
            nn.init.normal_(weight, std=1 / self.scale)

    def embed_source(self, tokens: Tensor) -> Tensor:
        """Embed source tokens."""
        vectors: Tensor = self.words(tokens) * self.scale
        return vectors

    def embed_target(self, tokens: Tensor) -> Tensor:
        """Embed target tokens."""
        vectors: Tensor = (self.words if self.targets is None else self.targets)(tokens) * self.scale
        return vectors

    def compute_logits(self, x: Tensor) -> Tensor:
        """Compute the logits of each token of the vocabulary for vectors, (..., n)."""
        return linear(x, self.words.weight) if self.head is None else self.head(x)
