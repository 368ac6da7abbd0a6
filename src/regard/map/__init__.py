"""The attention matrix as a value that is never stored."""

from regard.map.attention_map import AttentionMap, Certificate, Overview, Transposed
from regard.map.differentiable_map import DifferentiableMap
from regard.map.pyramid import Pyramid

__all__ = ["AttentionMap", "Certificate", "DifferentiableMap", "Overview", "Pyramid", "Transposed"]
