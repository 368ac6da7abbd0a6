"""What the tests of this folder share: float64, as in the tests of recording."""

from observe.conftest import float64_models, in_float64

__all__ = ["float64_models", "in_float64"]
