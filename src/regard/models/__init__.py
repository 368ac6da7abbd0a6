"""The models that the lectures lead up to, and models of transformers as they generate here."""

from regard.models.gpt2 import GPT2
from regard.models.gpt2_config import GPT2Config
from regard.models.transformers_decoder import TransformersDecoder

__all__ = ["GPT2", "GPT2Config", "TransformersDecoder"]
