"""The attention matrix as a value that is never stored."""

from regard.map.attention_map import AttentionMap, Certificate, Overview, Transposed
from regard.map.convolution import Convolution
from regard.map.differentiable_map import DifferentiableMap
from regard.map.implicit_map import ImplicitMap
from regard.map.linear_recurrence import LinearRecurrence
from regard.map.pyramid import Pyramid

__all__ = [
    "AttentionMap",
    "Certificate",
    "Convolution",
    "DifferentiableMap",
    "ImplicitMap",
    "LinearRecurrence",
    "Overview",
    "Pyramid",
    "Transposed",
]
