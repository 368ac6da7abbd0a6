"""The Transformer of 2017: an encoder reads a sentence, a decoder writes another, and only attention connects words.

Read it from top to bottom. Nothing is recurrent: each word attends to all the others at once, and its position is added to
its vector. Source: Vaswani et al. 2017; `norm="pre"` is Xiong et al. 2020.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.errors import ConfigError, ShapeError
from regard.layers import checks
from regard.matmul import Linear, refuse_quantized
from regard.mechanism import Causal, Mask, attention, heads
from regard.mechanism.heads import describe_indivisible_width
from regard.mechanism.positions import sinusoidal
from regard.mechanism.request import check_probability
from regard.models.translator_parts import Lengths, Vocabulary, check_lengths, check_token_matrix, make_padding_mask
from regard.text import BytePair
from regard.weights import translator_weights as files

Pair = tuple[Tensor, Tensor]  # keys and values, (b, h, t, d)


@dataclass(frozen=True, eq=False)
class TransformerMemory:
    """The encoder's output: a vector for each token, (b, s, c), and the number of tokens of each source without padding."""

    vectors: Tensor
    lengths: Lengths


@dataclass(frozen=True, eq=False)
class TransformerState:
    """The decoder's state: for each block the keys and values of the sources, and of the targets read so far."""

    sources: tuple[Pair, ...]
    lengths: Lengths
    targets: tuple[Pair, ...] = ()

    def select_rows(self, index: Tensor) -> "TransformerState":
        """Return the state of these rows, which may repeat."""
        sources, targets = (tuple((k[index], v[index]) for k, v in pairs) for pairs in (self.sources, self.targets))
        return TransformerState(sources, tuple(self.lengths[row] for row in index.tolist()), targets)


class Transformer(nn.Module):
    """Embeddings and positions, encoder blocks over the source, decoder blocks over target and source, and logits.

    Shapes: sources (b, s), of which the first lengths (b,) are no padding; targets (b, t); logits (b, t, n): what comes after
    each target token. Dropout is of the embeddings and of what each part of a block adds, as in the paper's section 5.4.
    """

    KIND = "transformer"

    def __init__(
        self,
        *,
        vocabulary: int,
        width: int = 256,
        heads: int = 4,
        layers: int = 3,
        inner: int | None = None,
        norm: str = "post",
        dropout: float = 0.0,
        tied: bool = True,
        context: int = 512,
    ) -> None:
        super().__init__()
        inner = 4 * width if inner is None else inner
        checks.check_sizes(vocabulary=vocabulary, width=width, heads=heads, layers=layers, inner=inner, context=context)
        if width % heads:
            raise ConfigError(describe_indivisible_width("width", width, "heads", heads))
        if norm not in ("post", "pre"):
            raise ConfigError(f'norm must be "post", after each part of a block, or "pre", before it; got {norm!r}.')
        self.sizes: dict[str, Any] = {
            "vocabulary": vocabulary,
            "width": width,
            "heads": heads,
            "layers": layers,
            "inner": inner,
            "norm": norm,
            "dropout": check_probability(dropout),
            "tied": tied,
            "context": context,
        }
        self.context = context
        self.text: BytePair | None = None
        self.vocabulary = Vocabulary(vocabulary, width, tied)
        self.register_buffer("positions", sinusoidal(context, width), persistent=False)
        self.dropout = nn.Dropout(dropout)
        first = norm == "pre"
        self.encoder = nn.ModuleList(EncoderBlock(width, heads, inner, dropout, first) for _ in range(layers))
        self.decoder = nn.ModuleList(DecoderBlock(width, heads, inner, dropout, first) for _ in range(layers))
        self.encoder_norm = nn.LayerNorm(width) if first else nn.Identity()  # with "post" the last block has normalized
        self.decoder_norm = nn.LayerNorm(width) if first else nn.Identity()
        self.init_weights()

    def forward(self, sources: Tensor, lengths: Tensor | Sequence[int], targets: Tensor) -> Tensor:
        """Compute the logits of what comes after each target token, given the source and the targets up to it."""
        check_token_matrix("targets", targets, self.context)
        return self.decode(targets, self.begin(self.encode(sources, lengths)))[0]

    def encode(self, sources: Tensor, lengths: Tensor | Sequence[int]) -> TransformerMemory:
        """Encode the sources."""
        found = check_lengths(sources, lengths, self.context)
        mask = make_padding_mask(found, sources.shape[1])
        x = self.add_positions(self.vocabulary.embed_source(sources), 0)
        for block in self.encoder:
            x = block(x, mask)
        return TransformerMemory(self.encoder_norm(x), found)

    def begin(self, memory: TransformerMemory) -> TransformerState:
        """Return the state before the first target token: each block's keys and values of the sources, computed once."""
        return TransformerState(
            tuple(cast(DecoderBlock, block).cross.project(memory.vectors) for block in self.decoder), memory.lengths
        )

    def read(self, tokens: Tensor, state: TransformerState) -> tuple[Tensor, TransformerState]:
        """Read one target token (b,) of each row; return the logits (b, n) of what comes after it, and the new state."""
        logits, state = self.decode(tokens.unsqueeze(1), state)
        return logits[:, 0], state

    def decode(self, targets: Tensor, state: TransformerState) -> tuple[Tensor, TransformerState]:
        """Read target tokens (b, t) after those of the state; return the logits (b, t, n) and the new state."""
        before = state.targets or (None,) * len(self.decoder)
        mask = make_padding_mask(state.lengths, state.sources[0][0].shape[2])
        x = self.add_positions(self.vocabulary.embed_target(targets), 0 if before[0] is None else before[0][0].shape[2])
        read = []
        for block, source, past in zip(self.decoder, state.sources, before, strict=True):
            x, pair = block(x, past, source, mask)
            read.append(pair)
        return self.vocabulary.compute_logits(self.decoder_norm(x)), TransformerState(state.sources, state.lengths, tuple(read))

    def add_positions(self, x: Tensor, first: int) -> Tensor:
        """Add positions to vectors (b, t, c), counted from `first`."""
        if first + x.shape[1] > self.context:
            raise ShapeError(
                f"{first} tokens are read and {x.shape[1]} more follow, but the model's context is {self.context}."
            )
        places = cast(Tensor, self.positions)[first : first + x.shape[1]]
        vectors: Tensor = self.dropout(x + places.to(x.dtype))
        return vectors

    def init_weights(self) -> None:
        """Initialize every matrix but the embeddings as Glorot's uniform, q, k and v separately; biases as zero."""
        for name, weight in (*self.encoder.named_parameters(), *self.decoder.named_parameters()):
            if weight.dim() == 2:
                for part in weight.split(weight.shape[1]) if "W_" in name else (weight,):
                    nn.init.xavier_uniform_(part)
            elif name.endswith("bias"):
                nn.init.zeros_(weight)

    def save(self, folder: str | Path, dtype: torch.dtype | None = None) -> None:
        """Write a folder that `regard.models.translator.load` reads, with the text if there is one.

        dtype is that of the stored numbers, the model's own by default; with torch.int8 matrices have one scale a row.
        """
        refuse_quantized(self)
        files.save_translator(folder, self.KIND, self.sizes, self.state_dict(), self.text, dtype)


class FusedSelfAttention(nn.Module):
    """Attention of a sequence to itself, with q, k and v from one product."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.heads = count
        self.W_query_key_value = Linear(width, 3 * width)
        self.out_proj = Linear(width, width)

    def forward(self, x: Tensor, mask: Mask, past: Pair | None = None) -> tuple[Tensor, Pair]:
        """Compute the output, and the keys and values of all tokens, those of the past before the new ones."""
        q, k, v = (heads.split(part, self.heads) for part in self.W_query_key_value(x).chunk(3, -1))
        offset = 0
        if past is not None:
            offset = past[0].shape[2]
            k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
        return self.out_proj(heads.join(attention(q, k, v, mask, offset=offset))), (k, v)


class CrossAttention(nn.Module):
    """Attention of the target to the source, whose keys and values are projected once a sentence."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.heads = count
        self.W_query = Linear(width, width)
        self.W_key_value = Linear(width, 2 * width)
        self.out_proj = Linear(width, width)

    def project(self, memory: Tensor) -> Pair:
        """Compute the keys and values of the source."""
        k, v = (heads.split(part, self.heads) for part in self.W_key_value(memory).chunk(2, -1))
        return k, v

    def forward(self, x: Tensor, source: Pair, mask: Mask) -> Tensor:
        """Compute the output of each target token's attention to the source."""
        context = attention(heads.split(self.W_query(x), self.heads), *source, mask)
        output: Tensor = self.out_proj(heads.join(context))
        return output


class FeedForward(nn.Module):
    """max(0, x W₁ + b₁) W₂ + b₂ of each token."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up = Linear(width, inner)
        self.down = Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the output, in the shape (b, t, c) of x."""
        output: Tensor = self.down(F.relu(self.up(x)))
        return output


class Residual(nn.Module):
    """norm(x + part(x)), as in 2017, or x + part(norm(x)): the residual connection around a part of a block, with its norm."""

    def __init__(self, width: int, dropout: float, first: bool) -> None:
        super().__init__()
        self.first = first
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def prepare_input(self, x: Tensor) -> Tensor:
        """Return the input of the part."""
        return self.norm(x) if self.first else x

    def add_output(self, x: Tensor, added: Tensor) -> Tensor:
        """Return the stream with the output of the part added."""
        x = x + self.dropout(added)
        return x if self.first else self.norm(x)


class EncoderBlock(nn.Module):
    """Self-attention of the source tokens, then a feed-forward layer."""

    def __init__(self, width: int, heads: int, inner: int, dropout: float, first: bool) -> None:
        super().__init__()
        self.attention = FusedSelfAttention(width, heads)
        self.feed = FeedForward(width, inner)
        self.around_attention, self.around_feed = (Residual(width, dropout, first) for _ in range(2))

    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        """Return the stream (b, s, c) after this block."""
        x = self.around_attention.add_output(x, self.attention(self.around_attention.prepare_input(x), mask)[0])
        return self.around_feed.add_output(x, self.feed(self.around_feed.prepare_input(x)))


class DecoderBlock(nn.Module):
    """Causal self-attention of the target tokens, then attention to the source, then a feed-forward layer."""

    def __init__(self, width: int, heads: int, inner: int, dropout: float, first: bool) -> None:
        super().__init__()
        self.attention = FusedSelfAttention(width, heads)
        self.cross = CrossAttention(width, heads)
        self.feed = FeedForward(width, inner)
        self.around_attention, self.around_cross, self.around_feed = (Residual(width, dropout, first) for _ in range(3))

    def forward(self, x: Tensor, past: Pair | None, source: Pair, mask: Mask) -> tuple[Tensor, Pair]:
        """Return the stream (b, t, c) after this block, and the keys and values of all target tokens."""
        seen, pair = self.attention(self.around_attention.prepare_input(x), Causal(), past)
        x = self.around_attention.add_output(x, seen)
        x = self.around_cross.add_output(x, self.cross(self.around_cross.prepare_input(x), source, mask))
        return self.around_feed.add_output(x, self.feed(self.around_feed.prepare_input(x))), pair
