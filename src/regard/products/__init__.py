"""Products of vectors with a large matrix, as fast as this machine allows: in float32, and with int8 weights."""

from regard.products.dense import linear
from regard.products.quantised import Quantised

__all__ = ["Quantised", "linear"]
