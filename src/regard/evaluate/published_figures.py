"""The figures that OpenAI published for the GPT-2 it released, for comparison with measured ones.

Source: Radford et al. 2019, Language Models are Unsupervised Multitask Learners, table 3: zero-shot results. Perplexities are
by word of the original text; LAMBADA's accuracy excludes stop words.
"""

from dataclasses import dataclass

MODELS = {"gpt2": "117M", "gpt2-medium": "345M", "gpt2-large": "762M", "gpt2-xl": "1542M"}  # to the paper's names
FIGURES = {  # in the order of the models
    ("LAMBADA", "perplexity"): (35.13, 15.60, 10.87, 8.63),
    ("LAMBADA", "accuracy, %"): (45.99, 55.48, 60.12, 63.24),
    ("WikiText-2", "perplexity"): (29.41, 22.76, 19.93, 18.34),
    ("PTB", "perplexity"): (65.85, 47.33, 40.31, 35.76),
    ("WikiText-103", "perplexity"): (37.50, 26.37, 22.05, 17.48),
}
FILES = {  # the evaluated texts by their sha256; both WikiTexts have the same test articles
    "4aa8d02cd17c719165fc8a7887fddd641f43fcafa4b1c806ca8abc31fabdb226": ("LAMBADA",),  # OpenAI's lambada_test.jsonl
    "173c87a53759e0201f33e0ccf978e510c2042d7f2cb78229d9a50d79b9e7dd08": ("WikiText-2", "WikiText-103"),  # wiki.test.raw
}


@dataclass(frozen=True)
class PublishedFigure:
    """A published figure: the model, the text, the measure, and the value."""

    model: str
    text: str
    measure: str
    figure: float


def list_published(model: str | None = None, on: str | None = None) -> list[PublishedFigure]:
    """List the figures of a model ("gpt2", ...) on a text ("LAMBADA", ...), or of all; empty for a model without figures."""
    return [
        PublishedFigure(name, text, measure, figure)
        for (text, measure), figures in FIGURES.items()
        for name, figure in zip(MODELS, figures, strict=True)
        if model in (None, name) and on in (None, text)
    ]
