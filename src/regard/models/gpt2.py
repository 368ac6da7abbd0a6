"""GPT-2, as in OpenAI's code: read it from top to bottom.

A text is a row of numbers. Each becomes a vector, the sum of a token and a position embedding; blocks add to these vectors,
first what comes from other tokens (attention), then what follows from the token itself (two linear layers); the vector of
each token, compared with the vectors of all words, gives the next word.
Source: Radford et al. 2019, and https://github.com/openai/gpt-2.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.errors import ConfigError, OutOfRangeError, ShapeError
from regard.generate import decode
from regard.generate.quantization import choose_cache_dtype
from regard.layers.gelu import gelu_tanh
from regard.layers.multi_head import CacheUpdate, MultiHeadAttention
from regard.matmul import Linear, linear, refuse_quantized, round_for_product
from regard.mechanism import EVERYTHING, Mask
from regard.mechanism.arguments import FLOATS, check_instance, check_path, describe_value
from regard.models.compiled_decoder import CompiledDecoder
from regard.models.gpt2_config import GPT2Config
from regard.models.gpt2_description import describe_gpt2
from regard.text import BytePair, Letters, byte_pair, letters
from regard.text.padded_vocabulary import pad_vocabulary
from regard.weights import gpt2 as files
from regard.weights.meta_modules import create_on_meta

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_tanh": gelu_tanh,  # GPT-2's own: tanh instead of the error function
    "gelu": F.gelu,
    "relu": F.relu,
    "silu": F.silu,
}


class KeyValueCache(Protocol):
    """Keys and values of earlier tokens: the positions of the next tokens, and each layer's past."""

    def extend(self, tokens: Tensor) -> Tensor:
        """Return the positions of the next tokens, (t,) or (b, t)."""

    def layer(self, number: int, dtype: torch.dtype | None = None) -> CacheUpdate:
        """Return the past of a layer, stored in this dtype, which is given only where weights are quantized."""

    def select_wanted(self, x: Tensor) -> Tensor:
        """Return those of the last vectors whose logits are wanted."""


class GPT2(nn.Module):
    """Token and position embeddings, blocks, a last norm, and a head that reuses the token embedding.

    Shapes: tokens (b, t) or (t,), integers below config.vocabulary, t at most config.context; logits (..., t, n).
    """

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.config = check_instance("config", config, GPT2Config)
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, eps=config.epsilon)
        self.head = None if config.tied else Linear(config.width, config.vocabulary, bias=False)
        self.text: BytePair | Letters | None = None
        self.init_weights()

    def forward(self, tokens: Tensor, cache: KeyValueCache | None = None, mask: Mask = EVERYTHING) -> Tensor:
        """Compute the logits of the next token after each token, which sees the tokens before it that the mask lets it see."""
        t = self.check_tokens(tokens).shape[-1]
        places = torch.arange(t, device=tokens.device) if cache is None else cache.extend(tokens)
        try:
            x = self.dropout(self.tokens(tokens) + self.positions(places))  # (b, t, c)
        except IndexError:
            last = self.config.vocabulary - 1
            wrong = int(tokens[(tokens < 0) | (tokens > last)][0])
            raise OutOfRangeError(f"token {wrong} is out of range: the model has tokens 0 to {last}.") from None
        projections = [] if cache is None else [getattr(block.attention, "W_key", None) for block in self.blocks]
        stored = choose_cache_dtype(projections, x.dtype)
        dtypes = () if stored is None else (stored,)  # a cache of another class need not take one
        for number, block in enumerate(self.blocks):
            x = block(x, None if cache is None else cache.layer(number, *dtypes), mask)
        x = self.norm(x if cache is None else cache.select_wanted(x))
        return linear(x, self.tokens.weight) if self.head is None else self.head(x)  # (b, t, n)

    def init_weights(self) -> None:
        """Initialize weights with normal numbers of deviation 0.02, biases with 0.

        The deviation of layers that add to the residual stream is smaller, so that the stream does not grow with depth.
        """
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                adds = name.endswith(("out_proj.weight", "down.weight"))
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * self.config.layers) if adds else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(weight)

    def check_tokens(self, tokens: Tensor) -> Tensor:
        """Return the tokens, or raise ShapeError if their type, shape or length is wrong."""
        if not isinstance(tokens, Tensor) or tokens.dim() not in (1, 2) or tokens.dtype not in (torch.int64, torch.int32):
            raise ShapeError(
                f"tokens must be whole numbers (b, t) or (t,), a tensor of int64 or int32; got {describe_value(tokens)}."
            )
        if tokens.layout is not torch.strided:
            raise ShapeError(f"tokens must be a dense tensor, got {describe_value(tokens)}. Use .to_dense().")
        if tokens.shape[-1] > self.config.context:
            raise ShapeError(f"there are {tokens.shape[-1]} tokens, but the model's context is {self.config.context}.")
        return tokens

    @classmethod
    def load(cls, name: str | Path, dtype: torch.dtype | None = None) -> "GPT2":
        """Load the model of a folder or file, or of a name ("pocket", "sorter", "gpt2", ...), in evaluation mode.

        Reads the files of transformers, OpenAI's TensorFlow code, nanoGPT and the lectures; see regard.weights.gpt2. Its text
        is the vocabulary in the folder, or GPT-2's if the size is GPT-2's. Raises WeightsError, naming the file and the tensor.
        """
        if dtype is not None and (not isinstance(dtype, torch.dtype) or dtype not in FLOATS):
            raise ConfigError(f"dtype must be float16, bfloat16, float32 or float64; got {describe_value(dtype)}.")
        found = files.load_weights(check_path("name", name), dtype)
        with create_on_meta():
            model = cls(GPT2Config(**found.config))
        model.load_state_dict(found.tensors, assign=True)
        model.text = load_text(found.folder, model.config.vocabulary)
        return model.eval()

    def save(self, folder: str | Path) -> None:
        """Write a folder that transformers reads too, with the text if there is one, in place of the text that was there."""
        refuse_quantized(self)
        files.save_weights(check_path("folder", folder), asdict(self.config), self.state_dict(), self.text)

    def generate(self, tokens: Tensor | Sequence[Any], max_new_tokens: int, **settings: Any) -> Iterator[Tensor]:
        """Generate the next tokens, (b,) at a time; the settings are those of regard.generate.Settings."""
        return decode.generate(self, tokens, max_new_tokens, **{**self.get_end_settings(), **settings})

    def complete(self, text: str, max_new_tokens: int, **settings: Any) -> Iterator[str]:
        """Continue a text, a piece at a time; needs model.text."""
        return decode.complete(self, text, max_new_tokens, **{**self.get_end_settings(), **settings})

    def reading(self) -> Callable[[Tensor, Any], Tensor]:
        """Return the model in the form for generation: called with few new tokens and a cache."""
        is_standard = type(self) is GPT2 and all(type(block) is Block for block in self.blocks)
        return CompiledDecoder(self, describe_gpt2) if is_standard else self

    def get_end_settings(self) -> dict[str, Any]:
        """Return the settings of generate that define the end of a text, if the model can end it."""
        if self.text is None:
            return {}
        end = self.text.special.get("<|endoftext|>")
        text = pad_vocabulary(self.text, self.config.vocabulary)
        return {"text": text, "end": None if end is None or end >= self.config.vocabulary else end}


class Block(nn.Module):
    """Attention to earlier tokens, then a feed-forward layer, each added to the residual stream."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        width, inner = config.width, config.inner
        self.norm_attention = nn.LayerNorm(width, eps=config.epsilon)
        self.attention = MultiHeadAttention(width, width, config.context, config.dropout, config.heads, qkv_bias=True)
        self.norm_feed = nn.LayerNorm(width, eps=config.epsilon)
        self.up = Linear(width, inner)
        self.down = Linear(inner, width)
        self.activation = ACTIVATIONS[config.activation]
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, past: CacheUpdate | None = None, mask: Mask = EVERYTHING) -> Tensor:
        """Return the stream (b, t, c) with this block's part added.

        The stream stays in its dtype where a part computes in bfloat16.
        """
        products = (getattr(self.attention, name, None) for name in ("W_query", "W_key", "W_value", "out_proj"))
        x = x + self.dropout(self.attention(round_for_product(self.norm_attention(x), *products), past, mask))
        hidden = self.activation(self.up(round_for_product(self.norm_feed(x), self.up, self.down)))
        stream: Tensor = x + self.dropout(self.down(hidden))
        return stream


def load_text(folder: Path, vocabulary: int) -> BytePair | Letters | None:
    """Load the letters or the encoding in a folder; else GPT-2's own for a vocabulary of its size; else None."""
    if (folder / letters.FILE_NAME).is_file():
        return Letters.load(folder)
    if any((folder / pairs).is_file() and (folder / numbers).is_file() for pairs, numbers in byte_pair.FILES):
        return BytePair.load(folder)
    return BytePair.gpt2() if vocabulary == BytePair.gpt2().vocabulary else None
