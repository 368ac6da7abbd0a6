"""Products of vectors with a large matrix, as fast as this machine allows: in float32, and with int8 weights."""

from regard.matmul.float32_linear import Linear, linear
from regard.matmul.quantized_linear import QuantizedLinear, refuse_quantized, round_for_product

__all__ = ["Linear", "QuantizedLinear", "linear", "refuse_quantized", "round_for_product"]
