"""What the tests of this folder share: float64, as in the tests of recording."""

from observe.conftest import in_float64, widened

__all__ = ["in_float64", "widened"]
