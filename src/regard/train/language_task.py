"""Language modeling: train a GPT-2 to predict the next token of a corpus."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from regard.models import GPT2
from regard.text import BytePair, Letters
from regard.text.corpus import Corpus, Reader, TokenBatch
from regard.text.corpus.reader import EpochReader
from regard.text.padded_vocabulary import pad_vocabulary
from regard.train import loss
from regard.train.config import TrainConfig
from regard.train.seeds import derive_seed
from regard.train.single_process import Engine
from regard.train.training_task import BatchReader
from regard.weights import gpt2 as files

Forward = Callable[..., Tensor]


@dataclass(frozen=True, eq=False)
class LanguageTask:
    """The task of language modeling: a corpus, and a GPT-2 that learns it."""

    config: TrainConfig
    corpus: Corpus

    @property
    def text(self) -> BytePair | Letters:
        """The vocabulary of the corpus."""
        return self.corpus.text

    @property
    def flops(self) -> float:
        """Floating-point operations to train on one token."""
        return self.config.gpt2.training_flops

    def identify_data(self) -> dict[str, int | str]:
        """Return values that identify the training part of the corpus, wherever it is stored."""
        corpus = self.split_corpus()[0]
        return {"tokens": corpus.tokens, "documents": corpus.documents, "checksum": corpus.checksum}

    def split_corpus(self) -> tuple[Corpus, Corpus | None]:
        """Return the training part of the corpus, and the held-out part, None if there is none."""
        return self.corpus.split(self.config.held_out) if self.config.held_out else (self.corpus, None)

    def make_readers(self, engine: Engine) -> tuple[Reader, Reader | None]:
        """Return the readers of the training text, and of the held-out text, None if there is none or it is never evaluated."""
        config = self.config
        share = {"batch": config.batch, "context": config.gpt2.context, "rank": engine.rank, "world": engine.world}
        training_part, held_out_part = self.split_corpus()
        reader = Reader(training_part, seed=config.seed, **share)
        if held_out_part is None or not config.evaluate_every:
            return reader, None
        return reader, EpochReader(held_out_part, seed=0, **share)

    def make_model(self) -> GPT2:
        """Create a GPT-2 with its initial weights, or those that the run starts from."""
        config = self.config
        model = GPT2(config.gpt2)
        if config.start:
            model.load_state_dict(files.load_weights(config.start, torch.float32).tensors)
        model.text = self.text
        return wrap_blocks(model, activation_checkpointing=config.activation_checkpointing, compiled=config.compile)

    def move_batch(self, batch: TokenBatch, device: torch.device) -> TokenBatch:
        """Move a batch to a device."""
        return (
            batch
            if device.type == "cpu"
            else TokenBatch(*(x.to(device) for x in (batch.tokens, batch.targets, batch.documents)))
        )

    def count_tokens(self, batch: TokenBatch, world: int) -> int:
        """Return the number of tokens that all processes read: their shares are equal."""
        return batch.tokens.numel() * world

    def compute_loss(self, model: nn.Module, batch: TokenBatch, count: float) -> Tensor:
        """Compute the cross entropy of the targets, with the config's label smoothing."""
        config = self.config
        return loss.compute_loss(
            model, batch, count=count, mask_documents=config.mask_documents, smoothing=config.label_smoothing
        )

    def compute_nats(self, model: nn.Module, batch: TokenBatch) -> Tensor:
        """Compute Σ -log p(target)."""
        return loss.compute_loss(model, batch, count=1, mask_documents=self.config.mask_documents)

    def generate_sample(self, model: GPT2, reader: BatchReader, step: int) -> str:
        """Generate a text after the prompt, with the same random numbers at the same step."""
        config = self.config
        prompt = self.text.encode(config.prompt) or self.find_start_tokens(reader)
        room = config.gpt2.context - len(prompt)
        settings = {**model.get_end_settings(), "seed": derive_seed(config.seed, step)}
        tokens = [int(one) for one in model.generate(prompt, min(config.sample_tokens, room), **settings)]
        return config.prompt + pad_vocabulary(self.text, model.config.vocabulary).bytes(tokens).decode(errors="replace")

    def find_start_tokens(self, reader: BatchReader) -> list[int]:
        """Return the tokens that a sample starts with if there is no prompt."""
        end = self.text.special.get("<|endoftext|>")
        return [int(reader.read(0).tokens[0, 0])] if end is None else [end]

    def save_model(self, folder: Path, model: GPT2, weights: dict[str, Tensor]) -> None:
        """Write a folder that GPT2.load reads."""
        files.save_weights(folder, asdict(self.config.gpt2), weights, self.text)

    def describe_data(self, reader: BatchReader) -> str:
        """Describe the number of training tokens, and the rows of an epoch."""
        corpus, context = self.split_corpus()[0], self.config.gpt2.context
        return f"{corpus.tokens:,} tokens, {-(-(corpus.tokens - 1) // context):,} rows an epoch"


def wrap_blocks(model: GPT2, *, activation_checkpointing: bool, compiled: bool) -> GPT2:
    """Wrap the forward methods of a model's blocks for training; names, weights and hooks stay unchanged.

    With activation_checkpointing only a block's input is saved for the gradient, and the rest is computed again with the same
    random numbers. Source: Chen et al. 2016, Training deep nets with sublinear memory cost.
    """
    for block in model.blocks:
        plain = forward = block.forward
        if compiled:
            forward = torch.compile(forward)
        if activation_checkpointing:
            forward = partial(checkpoint, forward, use_reentrant=False)
        if forward is not plain:
            block.forward = select_by_grad_mode(forward, plain)
    return model


def select_by_grad_mode(forward: Forward, plain: Forward) -> Forward:
    """Return a function that calls `forward` if gradients are enabled, else `plain`, as for samples and head observations."""

    def call_selected(*x: Any, **settings: Any) -> Tensor:
        return (forward if torch.is_grad_enabled() else plain)(*x, **settings)

    return call_selected
