"""Generation: tokens from any model that gives logits, read through a cache, chosen, and decoded to text as they come."""

from regard.generate.decode import TokenChoice, choices, complete, generate
from regard.generate.kv_cache import Cache
from regard.generate.quantization import quantise
from regard.generate.sampling import Sampling
from regard.generate.sequence_reader import PrefixCache
from regard.generate.settings import Settings
from regard.generate.speculate import Lookup

__all__ = [
    "Cache",
    "Lookup",
    "PrefixCache",
    "Sampling",
    "Settings",
    "TokenChoice",
    "choices",
    "complete",
    "generate",
    "quantise",
]
