"""The narrator: a trained Llama in llama2.c's file format, read as it lies there, and many stories draw_tokens from it at once.

Stories are draw_tokens side by side, each in a row of its own; where one ends the next begins in the same row, so that no row
waits.
Source of format and model: https://github.com/karpathy/llama2.c and https://huggingface.co/karpathy/tinyllamas (MIT).
"""

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

Numbers = np.ndarray[Any, Any]
START = 1  # the token that stands before a story, and after it
EPSILON = 1e-5


@dataclass(frozen=True)
class Narrator:
    """The weights of the file, by its names; the first axis of a layer's weights is the layer."""

    embedding: Tensor  # (n, c)
    norm_attention: Tensor  # (layers, c)
    qkv: Tensor  # (layers, 3 c, c)
    out: Tensor  # (layers, c, c)
    norm_feed: Tensor
    gate_up: Tensor  # (layers, 2 inner, c)
    down: Tensor  # (layers, c, inner)
    norm: Tensor  # (c,)
    heads: int
    context: int

    @classmethod
    def load(cls, path: Path, dtype: torch.dtype = torch.bfloat16) -> "Narrator":
        """Read a model file of llama2.c."""
        with path.open("rb") as file:
            c, inner, layers, heads, groups, n, context = struct.unpack("7i", file.read(28))
            assert groups == heads, "grouped keys are not read here"
            assert n > 0, "a head that is not the embedding is not read here"
            numbers = torch.from_numpy(np.fromfile(file, np.float32)).to(dtype)
        place = 0

        def take(*shape: int) -> Tensor:
            nonlocal place
            count = int(np.prod(shape))
            place += count
            return numbers[place - count : place].reshape(shape)

        embedding, norm_attention = take(n, c), take(layers, c)
        qkv = torch.cat([take(layers, c, c) for _ in range(3)], 1)
        out, norm_feed = take(layers, c, c), take(layers, c)
        gate, down, up = take(layers, inner, c), take(layers, c, inner), take(layers, inner, c)
        return cls(
            embedding,
            norm_attention,
            qkv,
            out,
            norm_feed,
            torch.cat([gate, up], 1),
            down,
            take(c),
            heads=heads,
            context=context,
        )

    @torch.inference_mode()
    def generate_stories(
        self,
        count: int,
        *,
        rows: int,
        seed: int,
        top_k: int = 40,
        top_p: float = 0.9,
        temperatures: Sequence[float] = (1.0,),
    ) -> Iterator[list[int]]:
        """Yield at least `count` stories in the order in which they end, each without its start token.

        Row i samples at temperature i modulo their number. A story longer than the context is cut.
        """
        generator = torch.Generator().manual_seed(seed)
        layers, c = len(self.qkv), self.embedding.shape[1]
        d, t = c // self.heads, self.context
        keys, values = torch.zeros(layers, rows, self.heads, d, t), torch.zeros(layers, rows, self.heads, t, d)
        rotations = compute_rotations(t, d)  # (t, d / 2)
        tokens, lengths = torch.full((rows,), START), torch.zeros(rows, dtype=torch.long)  # tokens of each story so far
        rows_tokens: list[list[int]] = [[] for _ in range(rows)]
        scale = torch.tensor([temperatures[row % len(temperatures)] for row in range(rows)])[:, None]
        while count > 0:
            rotation = rotations[lengths][:, None]  # (b, 1, d / 2)
            x = self.embedding[tokens]
            for layer in range(layers):
                projected = F.linear(normalize_vectors(x, self.norm_attention[layer]), self.qkv[layer])
                q, k, v = projected.view(rows, 3, self.heads, d).unbind(1)
                arguments = (
                    rotate_pairs(q, rotation),
                    rotate_pairs(k, rotation),
                    v.float().contiguous(),
                    keys[layer],
                    values[layer],
                    lengths,
                )
                context = torch.from_numpy(attend_cache(*(one.numpy() for one in arguments))).to(x.dtype)
                x = x + F.linear(context.view(rows, c), self.out[layer])
                gate, up = F.linear(normalize_vectors(x, self.norm_feed[layer]), self.gate_up[layer]).chunk(2, -1)
                x = x + F.linear(F.silu(gate) * up, self.down[layer])
            tokens = draw_tokens(
                F.linear(normalize_vectors(x, self.norm), self.embedding).float() / scale, top_k, top_p, generator
            )
            lengths += 1
            for row, token in enumerate(tokens.tolist()):
                if token != START:
                    rows_tokens[row].append(token)
                if token == START or len(rows_tokens[row]) == t:
                    yield rows_tokens[row]
                    count -= 1
                    rows_tokens[row], lengths[row], tokens[row] = [], 0, START


@numba.njit(parallel=True, fastmath=True)
def attend_cache(q: Numbers, k: Numbers, v: Numbers, keys: Numbers, values: Numbers, lengths: Numbers) -> Numbers:
    """softmax(q kᵀ / √d) v of one query a row, over the keys up to its lengths; k and v are put among them first."""
    b, h, d = q.shape
    context = np.zeros((b, h, d), np.float32)
    for row in numba.prange(b):
        now = lengths[row]
        scores = np.empty(now + 1, np.float32)
        for head in range(h):
            scores[:] = 0
            for i in range(d):
                keys[row, head, i, now] = k[row, head, i]
                part = q[row, head, i] / np.float32(math.sqrt(d))
                for t in range(now + 1):
                    scores[t] += part * keys[row, head, i, t]
            most, total = scores.max(), np.float32(0)
            for t in range(now + 1):
                scores[t] = math.exp(scores[t] - most)
                total += scores[t]
            values[row, head, now] = v[row, head]
            for t in range(now + 1):
                part = scores[t] / total
                for i in range(d):
                    context[row, head, i] += part * values[row, head, t, i]
    return context


def compute_rotations(t: int, d: int) -> Tensor:
    """Return e^(i p θ) for each position p and frequency θ: complex, (t, d / 2)."""
    frequencies = 10000.0 ** (-torch.arange(0, d, 2) / d)
    angles = torch.outer(torch.arange(t), frequencies)
    return torch.polar(torch.ones_like(angles), angles)


def rotate_pairs(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate each pair of neighbours of (b, h, d) by its position's angle, in float32."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotation).flatten(-2)


def normalize_vectors(x: Tensor, weight: Tensor) -> Tensor:
    """x / root mean square of x, times weight."""
    return F.rms_norm(x, weight.shape, weight, EPSILON)


def draw_tokens(logits: Tensor, top_k: int, top_p: float, generator: torch.Generator) -> Tensor:
    """Sample a token for each row from its top_k likeliest, cut where they together reach top_p."""
    values, tokens = logits.topk(top_k)
    odds = values.softmax(-1)
    odds[odds.cumsum(-1) - odds > top_p] = 0  # the likeliest is always kept
    return tokens.gather(-1, torch.multinomial(odds, 1, generator=generator))[:, 0]


def read_vocabulary(path: Path) -> list[bytes]:
    """Read the bytes of each token from llama2.c's tokenizer.bin."""
    data, found, place = path.read_bytes(), [], 4
    while place < len(data):
        _, length = struct.unpack_from("fi", data, place)
        word = data[place + 8 : place + 8 + length]
        single = word.startswith(b"<0x") and len(word) == 6
        found.append(bytes([int(word[3:5], 16)]) if single else word)
        place += 8 + length
    return found
