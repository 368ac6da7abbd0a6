"""The description of a GPT-2 for the compiled decoder."""

import math
from typing import Any

import torch
from torch import nn

from regard.generate.quantization import QuantizedEmbedding
from regard.layers.gelu import gelu_tanh
from regard.layers.multi_head import MultiHeadAttention
from regard.matmul import Linear, QuantizedLinear
from regard.matmul.float32_linear import LEAST
from regard.models.compiled_decoder import (
    NO_MATRIX,
    DecoderDescription,
    ExpectedTensor,
    is_modified,
    list_matrix_parts,
    list_norm_parts,
)

NORMS = ("norm_attention", "norm_feed")  # norms of a block
MATRICES = ("attention.W_query", "attention.W_key", "attention.W_value", "attention.out_proj", "up", "down")
PARTS = {MultiHeadAttention, Linear, QuantizedLinear, QuantizedEmbedding, nn.Embedding, nn.LayerNorm, nn.Dropout, nn.ModuleList}


def describe_gpt2(model: Any) -> DecoderDescription | None:
    """Describe a GPT-2, or return None if it has other parts or settings than those of its class, or is very small."""
    config, c = model.config, model.config.width
    if c * c < LEAST or len(model.blocks) != config.layers or not has_standard_parts(model):
        return None
    words = model.tokens.weight if isinstance(model.tokens, nn.Embedding) else None
    sizes = dict.fromkeys(MATRICES, (c, c)) | {"up": (config.inner, c), "down": (c, config.inner)}
    parts = [
        list_matrix_parts(model.tokens if model.head is None else model.head, config.vocabulary, c),
        list_norm_parts(model.norm, c),
    ]
    for block in model.blocks:
        parts += [list_norm_parts(block.get_submodule(name), c) for name in NORMS]
        parts += [list_matrix_parts(block.get_submodule(name), *size) for name, size in sizes.items()]
        parts.append(NO_MATRIX)
    return DecoderDescription(
        heads=config.heads,
        key_heads=config.heads,
        head_width=c // config.heads,
        width=c,
        inner=config.inner,
        vocabulary=config.vocabulary,
        layers=config.layers,
        epsilon=config.epsilon,
        scale=1 / math.sqrt(c // config.heads),
        embed=lambda tokens, positions: model.tokens(tokens) + model.positions(positions),
        embedding=[
            ExpectedTensor(words, (config.vocabulary, c), (torch.float32, None)),
            ExpectedTensor(model.positions.weight, (config.context, c), (torch.float32,)),
        ],
        parts=parts,
    )


def has_standard_parts(model: Any) -> bool:
    """Return whether a GPT-2 has exactly the parts that the compiled form implements, whatever their weights."""
    known = PARTS | {type(model), type(model.blocks[0])}
    return (
        all(type(part) in known and not is_modified(part) for part in model.modules())
        and model.norm.eps == model.config.epsilon
        and all(has_standard_settings(block, model.config) for block in model.blocks)
    )


def has_standard_settings(block: Any, config: Any) -> bool:
    """Return whether a block's settings are those of its model, and its GELU is the one by tanh."""
    epsilons = [block.get_submodule(name).eps for name in NORMS]
    return block.activation is gelu_tanh and epsilons == [config.epsilon] * 2 and block.attention.num_heads == config.heads
