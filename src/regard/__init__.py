"""regard: see attention, every step of it, at any length, at the speed of the fused kernels."""

from regard.errors import ConfigError, DataError, RegardError, ShapeError, TooLargeError, WeightsError
from regard.layers import (
    AdditiveAttention,
    BareSelfAttention,
    CausalAttention,
    MultiHeadAttention,
    SelfAttention,
    SimpleSelfAttention,
    StackedHeads,
)
from regard.map import AttentionMap
from regard.mechanism import (
    Causal,
    Documents,
    Everything,
    Given,
    Padding,
    Prefix,
    Steps,
    Window,
    attend,
    attention,
)

__version__ = "0.1.0"

__all__ = [
    "AdditiveAttention",
    "AttentionMap",
    "BareSelfAttention",
    "Causal",
    "CausalAttention",
    "ConfigError",
    "DataError",
    "Documents",
    "Everything",
    "Given",
    "MultiHeadAttention",
    "Padding",
    "Prefix",
    "RegardError",
    "SelfAttention",
    "ShapeError",
    "SimpleSelfAttention",
    "StackedHeads",
    "Steps",
    "TooLargeError",
    "WeightsError",
    "Window",
    "attend",
    "attention",
]
