"""The pretrained model that a run starts from, if it names one: it determines the sizes and the vocabulary of the run."""

from dataclasses import replace

from regard.errors import ConfigError
from regard.models import GPT2Config
from regard.models.gpt2 import load_text
from regard.train.config import DEFAULT_MODEL, TrainConfig
from regard.train.text_data import Tokenizer, list_token_bytes
from regard.weights import gpt2 as files


def apply_pretrained_sizes(config: TrainConfig) -> tuple[TrainConfig, Tokenizer | None]:
    """Return the config with the sizes of the model it starts from, and that model's vocabulary; config, None without one.

    Dropout is the run's own. Raises ConfigError for other sizes or another vocabulary, WeightsError if there is no such model.
    """
    if not config.start:
        return config, None
    if config.vocabulary:
        raise ConfigError(f"vocabulary is {config.vocabulary!r}, but {config.start} has one of its own. Leave it out.")
    found = files.describe_checkpoint(config.start)
    config_sizes = config.gpt2
    sizes = GPT2Config(**{**found.config, "dropout": config_sizes.dropout})
    if config_sizes not in (sizes, GPT2Config(**DEFAULT_MODEL, dropout=config_sizes.dropout)):
        raise ConfigError(f"[model] sets sizes, but {config.start} has its own. Leave them out; only dropout may be set.")
    own = load_text(found.folder, sizes.vocabulary)
    if own is None and config.text:
        raise ConfigError(
            f"{config.start} has no vocabulary in its folder, for example vocab.json and merges.txt, to encode a text. "
            "Put it there, or name as corpus a folder that was prepared with it."
        )
    return replace(config, model=sizes), own


def check_corpus_tokens(config: TrainConfig, own: Tokenizer | None, text: Tokenizer) -> None:
    """Raise ConfigError if the tokens of a corpus are not those of the model that the run starts from."""
    if own is not None and list_token_bytes(own) != list_token_bytes(text):
        raise ConfigError(
            f"the corpus was prepared with {text!r}, but {config.start} was trained on the tokens of {own!r}: "
            f"give the text itself as text, or prepare it with that model's vocabulary."
        )
