"""Translation: train a translator to predict the next token of a sentence from the previous ones and from its source."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from regard.errors import ConfigError
from regard.generate.translation_search import Translator, translate
from regard.text import BytePair
from regard.text.pairs import PairBatch, PairReader, Pairs, PairSet, prepare
from regard.text.pairs.sources import list_files
from regard.text.prepared_folder import Origin, hash_files
from regard.train.config import TrainConfig
from regard.train.fused_ops import cross_entropy
from regard.train.prepared_data import load_or_prepare
from regard.train.single_process import Engine
from regard.train.training_task import BatchReader
from regard.train.translator_sizes import TranslatorSizes
from regard.weights import translator_weights as files


@dataclass(frozen=True, eq=False)
class TranslationTask:
    """The task of translation: sentence pairs, and a translator that learns from them."""

    config: TrainConfig
    corpus: Pairs
    sizes: TranslatorSizes

    @classmethod
    def from_config(cls, config: TrainConfig, *, is_first: bool = True) -> "TranslationTask":
        """Create the task of a config; the first process prepares its pairs into out/corpus if they are not there yet."""
        corpus = load_or_prepare_pairs(config, is_first=is_first)
        sizes = fit_vocabulary(config, corpus)
        found = cls(replace(config, model=sizes), corpus, sizes)
        for part in (found.drop_long_pairs(corpus.train), found.drop_long_pairs(corpus.valid)):
            refuse_long_sentences(part, sizes.sizes.get("context"))
        return found

    @property
    def text(self) -> BytePair:
        """The encoding of both languages."""
        return self.corpus.text

    @property
    def flops(self) -> float:
        """Always 0, not counted: half of a recurrent translator's operations depend on the lengths of sentences."""
        return 0.0

    def identify_data(self) -> dict[str, int | str]:
        """Return values that identify the training pairs, wherever they are stored."""
        return {"pairs": len(self.corpus.train), "checksum": self.corpus.checksum}

    def drop_long_pairs(self, part: PairSet) -> PairSet:
        """Return the pairs of a part without those that are too long."""
        return part.limit_words(self.config.most_words) if self.config.most_words else part

    def make_readers(self, engine: Engine) -> tuple[PairReader, PairReader | None]:
        """Return the readers of the training part, and of the valid part, None if it is empty or never evaluated."""
        config, valid = self.config, self.drop_long_pairs(self.corpus.valid)
        share = {"tokens": config.batch_tokens, "rank": engine.rank, "world": engine.world}
        reader = PairReader(self.drop_long_pairs(self.corpus.train), seed=config.seed, **share)
        return reader, PairReader(valid, seed=0, **share) if len(valid) and config.evaluate_every else None

    def make_model(self) -> nn.Module:
        """Create a translator with its initial weights."""
        model = self.sizes.make_translator()
        model.text = self.text
        return model

    def move_batch(self, batch: PairBatch, device: torch.device) -> PairBatch:
        """Move a batch to a device; the lengths of sources stay in the CPU's memory, where they are used."""
        if device.type == "cpu":
            return batch
        return replace(batch, **{name: getattr(batch, name).to(device) for name in ("sources", "before", "targets")})

    def count_tokens(self, batch: PairBatch, world: int) -> int:
        """Return the number of real tokens, of sources and targets, that all processes read."""
        return batch.tokens

    def compute_loss(self, model: nn.Module, batch: PairBatch, count: float) -> Tensor:
        """Compute the cross entropy of the targets, with the config's label smoothing, divided by count."""
        return self.sum_cross_entropy(model, batch, self.config.label_smoothing) / max(count, 1)

    def compute_nats(self, model: nn.Module, batch: PairBatch) -> Tensor:
        """Compute Σ -log p(target)."""
        return self.sum_cross_entropy(model, batch, 0.0)

    def sum_cross_entropy(self, model: nn.Module, batch: PairBatch, smoothing: float) -> Tensor:
        """Compute the summed cross entropy of all targets, each predicted from the tokens before it."""
        logits = model(batch.sources, batch.lengths, batch.before)  # (b, t, n)
        return cross_entropy(logits.flatten(0, -2), batch.targets.flatten(), smoothing)

    def generate_sample(self, model: Translator, reader: BatchReader, step: int) -> str:
        """Return a sentence and its translation by the model: the prompt, or the first held-out sentence."""
        batch = reader.read(0)
        ids: Sequence[int] = self.text.encode(self.config.prompt) or batch.sources[0, : batch.lengths[0] - 1].tolist()
        (found,) = translate(model, [[*ids, self.text.end]], longest=self.config.sample_tokens)
        return f"{self.text.decode(ids)}\n{self.text.decode([one for one in found.tokens if one != self.text.end])}"

    def save_model(self, folder: Path, model: Translator, weights: dict[str, Tensor]) -> None:
        """Write a folder that regard.models.translator.load reads."""
        files.save_translator(folder, self.sizes.kind, model.sizes, weights, self.text)

    def describe_data(self, reader: BatchReader) -> str:
        """Describe the number of training pairs, and the batches of an epoch."""
        return f"{len(self.drop_long_pairs(self.corpus.train)):,} sentence pairs, {reader.batches:,} batches an epoch"


def load_or_prepare_pairs(config: TrainConfig, *, is_first: bool = True) -> Pairs:
    """Return the sentence pairs of a config; with several processes the first prepares them, before the others load."""
    if bool(config.corpus) == bool(config.pairs):
        raise ConfigError("a translator needs either corpus, a prepared folder of pairs, or pairs, files to prepare.")
    if config.corpus or not is_first:
        return Pairs.load(config.corpus or Path(config.out) / "corpus")
    if config.vocabulary in ("", "letters"):
        raise ConfigError(
            f"vocabulary must be gpt2, or the number of pieces to learn, for example 4000; got {config.vocabulary!r}."
        )
    return load_or_prepare(
        config, config.pairs, lambda: make_pairs_origin(config), Pairs.load, lambda folder: prepare_pairs(config, folder)
    )


def prepare_pairs(config: TrainConfig, folder: Path) -> Pairs:
    """Prepare the sentence pairs of a config's files into a folder."""
    source, target = config.languages
    size = BytePair.gpt2() if config.vocabulary == "gpt2" else int(config.vocabulary)
    return prepare(config.pairs, folder, vocabulary=size, languages=(source, target))


def make_pairs_origin(config: TrainConfig) -> Origin:
    """Return the origin of a config's pairs: the hash of the files' contents, and the settings that they are read with."""
    source, target = config.languages
    paths = [path for one in config.pairs for path in list_files(one, (source, target))]
    settings = {"vocabulary": config.vocabulary, "languages": [source, target]}
    return Origin(config.pairs, hash_files(paths, with_names=True), settings)


def fit_vocabulary(config: TrainConfig, corpus: Pairs) -> TranslatorSizes:
    """Return the sizes with the pairs' vocabulary if none was given; raise ConfigError if the given one is too small for it."""
    assert isinstance(config.model, TranslatorSizes)
    size, vocabulary = corpus.text.vocabulary, config.model.vocabulary
    if vocabulary and vocabulary < size:
        raise ConfigError(f"model.vocabulary is {vocabulary:,}, but the pairs have {size:,}. Leave it out.")
    return replace(config.model, sizes={**config.model.sizes, "vocabulary": vocabulary or size})


def refuse_long_sentences(part: PairSet, context: int | None) -> None:
    """Raise ConfigError if a sentence is longer than the model's context."""
    longest = int(part.lengths.max()) + 1 if len(part) else 0
    if context is not None and longest > context:
        raise ConfigError(
            f"a {part.name} sentence has {longest:,} tokens with its end, but model.context is {context:,}. "
            "Increase it, or leave out long sentences with most_words."
        )
