"""How well a model predicts text: perplexity, LAMBADA, and the figures that were published for GPT-2."""

from regard.evaluate.lambada import Lambada, lambada, stop_tokens
from regard.evaluate.perplexity import Perplexity, perplexity
from regard.evaluate.published_figures import PublishedFigure, list_published

__all__ = ["Lambada", "Perplexity", "PublishedFigure", "lambada", "list_published", "perplexity", "stop_tokens"]
