"""Products of vectors with a large matrix, as fast as this machine can do them: in float32, and with its numbers in bytes."""

from regard.products.dense import linear
from regard.products.quantised import Quantised

__all__ = ["Quantised", "linear"]
