"""Vocabulary: the embeddings of a translator's words, and the logits over them."""

import math

from torch import Tensor, nn

from regard.matmul import Linear, linear


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
