"""The attention layers of the lectures, each with one idea more than the last."""

from regard.layers.additive import AdditiveAttention
from regard.layers.causal import CausalAttention
from regard.layers.multi_head import MultiHeadAttention, StackedHeads
from regard.layers.self_attention import BareSelfAttention, SelfAttention
from regard.layers.simple import SimpleSelfAttention

__all__ = [
    "AdditiveAttention",
    "BareSelfAttention",
    "CausalAttention",
    "MultiHeadAttention",
    "SelfAttention",
    "SimpleSelfAttention",
    "StackedHeads",
]
