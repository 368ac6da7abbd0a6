"""A language: a GPT-2 learns to foretell the next token of a corpus."""

from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from regard.models import GPT2
from regard.text import BytePair, Letters
from regard.text.corpus import Batch, Corpus, Reader
from regard.train import loss, quick, subject
from regard.train.alone import Engine
from regard.train.blocks import applied
from regard.train.config import TrainConfig
from regard.train.flops import flops_of
from regard.train.seeds import seed_of
from regard.weights import gpt2 as files


@dataclass(frozen=True, eq=False)
class Language:
    """A corpus, and a GPT-2 that learns it."""

    config: TrainConfig
    corpus: Corpus

    @property
    def text(self) -> BytePair | Letters:
        """The corpus's."""
        return self.corpus.text

    @property
    def flops(self) -> float:
        """Floating-point operations to train on one token."""
        return flops_of(self.config.gpt2)

    def identity(self) -> dict[str, int | str]:
        """What tells the part that is trained on from others, wherever it lies."""
        corpus = self.trained()[0]
        return {"tokens": corpus.tokens, "documents": corpus.documents, "checksum": corpus.checksum}

    def trained(self) -> tuple[Corpus, Corpus | None]:
        """What is trained on, and what is held out."""
        return self.corpus.split(self.config.held_out) if self.config.held_out else (self.corpus, None)

    def readers(self, engine: Engine) -> tuple[Reader, Reader | None]:
        """The reader of the text trained on, and of the held-out one where there is any."""
        config = self.config
        share = {"batch": config.batch, "context": config.gpt2.context, "rank": engine.rank, "world": engine.world}
        trained, kept = self.trained()
        reader = Reader(trained, seed=config.seed, **share)
        return reader, Reader(kept, seed=0, **share) if kept is not None and config.evaluate_every else None

    def model(self) -> GPT2:
        """A GPT-2 with its first weights, or those it starts from."""
        config = self.config
        model = quick.fit(GPT2(config.gpt2))
        if config.start:
            model.load_state_dict(files.load(config.start, torch.float32).tensors)
        model.text = self.text
        return applied(model, activation_checkpointing=config.activation_checkpointing, compiled=config.compile)

    def placed(self, batch: Batch, where: torch.device) -> Batch:
        """A batch on a device."""
        return batch if where.type == "cpu" else Batch(*(x.to(where) for x in (batch.tokens, batch.targets, batch.documents)))

    def tokens(self, batch: Batch, world: int) -> int:
        """How many tokens all processes read: shares are equal."""
        return batch.tokens.numel() * world

    def loss(self, model: nn.Module, batch: Batch, count: float) -> Tensor:
        """The cross entropy of the targets, smoothed where the config says so."""
        config = self.config
        return loss.loss_of(model, batch, count=count, mask_documents=config.mask_documents, smoothing=config.label_smoothing)

    def nats(self, model: nn.Module, batch: Batch) -> Tensor:
        """Σ -log p(target)."""
        return loss.loss_of(model, batch, count=1, mask_documents=self.config.mask_documents)

    def sampled(self, model: GPT2, reader: subject.Reader, step: int) -> str:
        """What the model writes after the prompt, the same dice at the same step."""
        config = self.config
        prompt = self.text.encode(config.prompt) or self.opening(reader)
        room = config.gpt2.context - len(prompt)
        settings = {**model.ending(), "seed": seed_of(config.seed, step)}
        tokens = [int(one) for one in model.generate(prompt, min(config.sample_tokens, room), **settings)]
        return config.prompt + self.text.decode(tokens)

    def opening(self, reader: subject.Reader) -> list[int]:
        """What a sample begins with where nothing is said."""
        end = self.text.special.get("<|endoftext|>")
        return [int(reader.read(0).tokens[0, 0])] if end is None else [end]

    def save(self, folder: Path, model: GPT2, weights: dict[str, Tensor]) -> None:
        """Writes a folder that GPT2.load reads."""
        self.text.save(folder)
        files.save(folder, asdict(self.config.gpt2), weights)

    def about(self, reader: subject.Reader) -> str:
        """The tokens that are trained on, and the rows of an epoch."""
        corpus, context = self.trained()[0], self.config.gpt2.context
        return f"{corpus.tokens:,} tokens, {-(-(corpus.tokens - 1) // context):,} rows an epoch"
