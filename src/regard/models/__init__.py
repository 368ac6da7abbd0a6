"""The models that the lectures walk towards."""

from regard.models.gpt2 import GPT2
from regard.models.gpt2_config import GPT2Config

__all__ = ["GPT2", "GPT2Config"]
