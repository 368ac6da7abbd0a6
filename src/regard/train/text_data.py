"""The text of a run: a prepared corpus, or a text that is prepared once in the run's folder."""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from regard.errors import ConfigError
from regard.models import GPT2Config
from regard.text import BytePair, Letters
from regard.text.corpus import Corpus, prepare
from regard.text.corpus.sources import iterate_parts, list_files
from regard.text.prepared_folder import Origin, hash_files
from regard.train.config import TrainConfig
from regard.train.prepared_data import load_or_prepare

Tokenizer = BytePair | Letters


def load_or_prepare_corpus(
    config: TrainConfig,
    progress: Callable[[int, int | None], None] | None = None,
    own: Tokenizer | None = None,
    *,
    is_first: bool = True,
) -> Corpus:
    """Return the corpus of a config; its text is prepared into out/corpus if it is not there yet, with its own vocabulary.

    That vocabulary is `own` if given, else the config's. With several processes the first prepares, before the others load.
    """
    if bool(config.corpus) == bool(config.text):
        raise ConfigError("a run needs either corpus, a prepared folder, or text, a text to prepare.")
    if config.corpus:
        if not Path(config.corpus).is_dir():
            raise ConfigError(
                f"corpus must be a prepared folder, and {config.corpus} is not one. If it is a text, give it as text."
            )
        corpus = Corpus.load(config.corpus)
        refuse_other_vocabulary(config, corpus)
        return corpus
    if not is_first:
        return Corpus.load(Path(config.out) / "corpus")
    return load_or_prepare(
        config,
        (config.text,),
        lambda: make_text_origin(config, own),
        Corpus.load,
        lambda folder: prepare(config.text, own or make_tokenizer(config), folder, progress=progress),
    )


def refuse_other_vocabulary(config: TrainConfig, corpus: Corpus) -> None:
    """Raise ConfigError if a config names another vocabulary than a prepared corpus has."""
    text, asked = corpus.text, config.vocabulary
    if not asked or (asked == "letters" and isinstance(text, Letters)):
        return
    sizes = {"gpt2": GPT2Config.vocabulary, "letters": 0}
    if not isinstance(text, BytePair) or text.vocabulary != (sizes[asked] if asked in sizes else int(asked)):
        raise ConfigError(
            f"vocabulary is {asked}, but the corpus {config.corpus} was prepared with {text}. Leave vocabulary out, or give "
            "the text itself as text in place of corpus: it is prepared with the vocabulary."
        )


def make_text_origin(config: TrainConfig, own: Tokenizer | None) -> Origin:
    """Return the origin of a config's text: the hash of its contents, and the vocabulary that encodes it."""
    settings: dict[str, str] = {"vocabulary": config.vocabulary}
    if own is not None:
        pieces = b"".join(len(word).to_bytes(4, "little") + word for word in list_token_bytes(own))
        settings = {"vocabulary": hashlib.blake2b(pieces, digest_size=16).hexdigest()}
    return Origin((config.text,), hash_files(list_files(Path(config.text)), with_names=False), settings)


def list_token_bytes(text: Tokenizer) -> list[bytes]:
    """Return the bytes of each token in the vocabulary."""
    return [text.bytes([number]) for number in range(text.vocabulary)]


def make_tokenizer(config: TrainConfig) -> Tokenizer:
    """Return the vocabulary for a text that is not prepared yet: GPT-2's, its own letters, or pieces learned from it."""
    if config.vocabulary == "gpt2":
        return BytePair.gpt2()
    texts = (part.text for part in iterate_parts(config.text))
    if config.vocabulary == "letters":
        return Letters.from_texts(texts)
    return BytePair.train(texts, int(config.vocabulary))


def check_prompt(config: TrainConfig, text: Tokenizer) -> None:
    """Raise DataError if the vocabulary lacks a character of the prompt, ConfigError if the context is too short for it."""
    length, context = len(text.encode(config.prompt)), config.gpt2.context
    if length >= context:
        raise ConfigError(f"the prompt is {length} tokens, and must be shorter than the model's context, {context}.")


def fit_vocabulary(config: TrainConfig, corpus: Corpus) -> TrainConfig:
    """Set the model's vocabulary to the corpus's if none was given; raise ConfigError if the given one is too small for it."""
    size, model = corpus.text.vocabulary, config.gpt2
    if model.vocabulary == GPT2Config.vocabulary:
        return replace(config, model=replace(model, vocabulary=size))
    if model.vocabulary < size:
        raise ConfigError(f"model.vocabulary is {model.vocabulary:,}, but the corpus has {size:,}. Leave it out.")
    return config
