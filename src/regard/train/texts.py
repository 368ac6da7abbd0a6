"""The text of a run: a corpus that was prepared, or a text that is prepared once, in the run's own folder."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from regard.errors import ConfigError
from regard.models import GPT2Config
from regard.text import BytePair, Letters
from regard.text.corpus import Corpus, documents, prepare
from regard.train.config import TrainConfig

Text = BytePair | Letters


def corpus_of(
    config: TrainConfig, progress: Callable[[int, int | None], None] | None = None, own: Text | None = None
) -> Corpus:
    """The corpus that a config names; its text is prepared into out/corpus where it is not there yet, with its own vocabulary.

    That is the one given, or else the config's.
    """
    if bool(config.corpus) == bool(config.text):
        raise ConfigError("a run needs its corpus, a folder that was prepared, or its text, to be prepared: one of the two.")
    if config.corpus:
        if not Path(config.corpus).is_dir():
            raise ConfigError(
                f"corpus is a folder that was prepared, and {config.corpus} is none. Is it a text? Say it as text."
            )
        return Corpus.load(config.corpus)
    folder = Path(config.out) / "corpus"
    if folder.is_dir():
        return Corpus.load(folder)
    return prepare(config.text, own or encoding(config), folder, progress=progress)


def encoding(config: TrainConfig) -> Text:
    """The vocabulary of a text that is not prepared yet: GPT-2's, its own letters, or pieces learned from it."""
    if config.vocabulary == "gpt2":
        return BytePair.gpt2()
    texts = documents(config.text)
    if config.vocabulary == "letters":
        return Letters.of(texts)
    return BytePair.train(texts, int(config.vocabulary))


def check_prompt(config: TrainConfig, text: Text) -> None:
    """Raises DataError or ConfigError for a prompt that the vocabulary does not have or the context has no room for."""
    length, context = len(text.encode(config.prompt)), config.gpt2.context
    if length >= context:
        raise ConfigError(f"the prompt is {length} tokens, and must be shorter than the model's context, {context}.")


def fitted(config: TrainConfig, corpus: Corpus) -> TrainConfig:
    """The config with the corpus's vocabulary, where none was said; ConfigError where there are too few logits for it."""
    size, model = corpus.text.vocabulary, config.gpt2
    if model.vocabulary == GPT2Config.vocabulary:
        return replace(config, model=replace(model, vocabulary=size))
    if model.vocabulary < size:
        raise ConfigError(f"model.vocabulary is {model.vocabulary:,}, and the corpus has {size:,}. Leave it out.")
    return config
