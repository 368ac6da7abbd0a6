"""Words to numbers and back."""

from regard.text.byte_pair import BytePair

__all__ = ["BytePair"]
