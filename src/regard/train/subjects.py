"""Selection of the training task of a config."""

from collections.abc import Callable

from regard.train import start, texts
from regard.train.config import TrainConfig
from regard.train.language import Language
from regard.train.sizes import TranslatorSizes
from regard.train.subject import Subject
from regard.train.translation import Translation


def subject_of(
    config: TrainConfig, progress: Callable[[int, int | None], None] | None = None, *, is_first: bool = True
) -> Subject:
    """Create the task of a config; the first process prepares its data. Raises ConfigError if the model cannot learn it."""
    if isinstance(config.model, TranslatorSizes):
        return Translation.of(config, is_first=is_first)
    config, own = start.begun(config)
    corpus = texts.corpus_of(config, progress, own, is_first=is_first)
    start.check_text(config, own, corpus.text)
    config = texts.fitted(config, corpus)
    texts.check_prompt(config, corpus.text)
    return Language(config, corpus)
