"""The models that the lectures lead up to."""

from regard.models.gpt2 import GPT2
from regard.models.gpt2_config import GPT2Config

__all__ = ["GPT2", "GPT2Config"]
