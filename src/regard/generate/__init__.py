"""Generation: tokens from any model that gives logits, read through a cache, chosen, and decoded to text as they come."""

from regard.generate.cache import Cache
from regard.generate.decode import Chosen, choices, complete, generate
from regard.generate.prepared import quantise
from regard.generate.reader import Opening
from regard.generate.sampling import Sampling
from regard.generate.settings import Settings
from regard.generate.speculate import Lookup

__all__ = ["Cache", "Chosen", "Lookup", "Opening", "Sampling", "Settings", "choices", "complete", "generate", "quantise"]
