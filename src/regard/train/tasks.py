"""Selection of the training task of a config."""

from collections.abc import Callable

from regard.train import pretrained, text_data
from regard.train.config import TrainConfig
from regard.train.language_task import LanguageTask
from regard.train.task import Task
from regard.train.translation_task import TranslationTask
from regard.train.translator_sizes import TranslatorSizes


def create_task(
    config: TrainConfig, progress: Callable[[int, int | None], None] | None = None, *, is_first: bool = True
) -> Task:
    """Create the task of a config; the first process prepares its data. Raises ConfigError if the model cannot learn it."""
    if isinstance(config.model, TranslatorSizes):
        return TranslationTask.from_config(config, is_first=is_first)
    config, own = pretrained.apply_pretrained_sizes(config)
    corpus = text_data.load_or_prepare_corpus(config, progress, own, is_first=is_first)
    pretrained.check_corpus_tokens(config, own, corpus.text)
    config = text_data.fit_vocabulary(config, corpus)
    text_data.check_prompt(config, corpus.text)
    return LanguageTask(config, corpus)
