"""Small runs that the tests of this room train: a model of a few thousand numbers, and a text that a child could learn."""

from pathlib import Path

from regard.models import GPT2Config
from regard.text import Letters
from regard.text.corpus import prepare
from regard.train import TrainConfig

TEXT = "the cat sat on the mat, and the dog saw the cat again and again. " * 30
SIZES = {"layers": 2, "heads": 2, "width": 12, "context": 11}


def corpus(folder: Path, text: str | list[str] = TEXT) -> str:
    """A folder with the text prepared in it, letter by letter."""
    texts = [text] if isinstance(text, str) else text
    prepare(texts, Letters.of(texts), folder / "corpus", workers=1)
    return str(folder / "corpus")


def config(folder: Path, **settings) -> TrainConfig:
    """A run of a few steps in a folder, on the corpus beside it."""
    sizes = {name: settings.pop(name) for name in (*SIZES, "dropout") if name in settings}
    first = {"corpus": str(folder / "corpus"), "out": str(folder / "run"), "steps": 7, "batch": 3, "warmup": 2}
    first |= {"evaluate_every": 3, "evaluate_batches": 2, "checkpoint_every": 2, "spike": 0.0}
    return TrainConfig(**{**first, **settings, "model": GPT2Config(**{**SIZES, **sizes})})
