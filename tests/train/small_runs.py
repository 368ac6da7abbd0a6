"""Small runs that the tests of this room train: a model of a few thousand numbers, and a text that a child could learn."""

from pathlib import Path

from regard.models import GPT2Config
from regard.text import Letters
from regard.text import pairs as sentence_pairs
from regard.text.corpus import prepare
from regard.train import TrainConfig, Training
from regard.train.listeners.json_lines import read_rows
from text.pairs.small_pairs import make_pairs, write_pairs

TEXT = "the cat sat on the mat, and the dog saw the cat again and again. " * 30
TRANSLATORS = {
    "transformer": {"kind": "transformer", "width": 12, "heads": 2, "layers": 2, "context": 61},
    "additive": {"kind": "recurrent", "attention": "additive", "width": 10, "hidden": 11},
    "plain": {"kind": "recurrent", "width": 10, "hidden": 11, "cell": "lstm"},
}
SIZES = {"layers": 2, "heads": 2, "width": 12, "context": 11}


def corpus(folder: Path, text: str | list[str] = TEXT) -> str:
    """A folder with the text prepared in it, letter by letter."""
    texts = [text] if isinstance(text, str) else text
    prepare(texts, Letters.from_texts(texts), folder / "corpus", workers=1)
    return str(folder / "corpus")


def config(folder: Path, **settings) -> TrainConfig:
    """A run of a few steps in a folder, on the corpus beside it."""
    sizes = {name: settings.pop(name) for name in (*SIZES, "dropout") if name in settings}
    first = {"corpus": str(folder / "corpus"), "out": str(folder / "run"), "steps": 7, "batch": 3, "warmup": 2}
    first |= {"evaluate_every": 3, "evaluate_batches": 2, "checkpoint_every": 2, "spike": 0.0}
    return TrainConfig(**{**first, **settings, "model": GPT2Config(**{**SIZES, **sizes})})


def pairs(folder: Path, count: int = 90) -> str:
    """A folder with small sentence pairs prepared in it, some of them held out."""
    made = sentence_pairs.prepare(
        write_pairs(folder, "some", make_pairs(count)), folder / "pairs", vocabulary=290, valid=0.2, test=0.1
    )
    return str(made.folder)


def translation(folder: Path, name: str, **settings) -> TrainConfig:
    """A run of a few steps of a translator, on the pairs beside it."""
    first = {"corpus": str(folder / "pairs"), "out": str(folder / "run"), "steps": 7, "batch_tokens": 150, "warmup": 2}
    first |= {"evaluate_every": 3, "evaluate_batches": 2, "checkpoint_every": 2, "spike": 0.0, "label_smoothing": 0.1}
    sizes = {**TRANSLATORS[name], **settings.pop("model", {})}
    return TrainConfig.from_table({**first, **settings, "model": sizes})


def read_log(out: Path) -> list[dict]:
    """The rows of a run's log, without the time they took."""
    return [{name: value for name, value in row.items() if name != "seconds"} for row in read_rows(out / "log.jsonl")]


def read_bits(training: Training) -> list[bytes]:
    """The bits of the weights and of the optimizer's moments."""
    moments = [x for state in training.optimizer.state.values() for x in state.values()]
    return [x.detach().numpy().tobytes() for x in [*training.model.state_dict().values(), *moments]]
