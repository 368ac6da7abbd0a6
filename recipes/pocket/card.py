"""The pocket model into the package, in bfloat16, with its card: what it was made of, what it can do, and what its heads do."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recipes.pocket.ngram import KneserNey
from regard.evaluate import perplexity
from regard.models import GPT2
from regard.text.corpus import Corpus
from regard.train import TrainConfig

PACKAGE = Path(__file__).parents[2] / "src" / "regard" / "weights" / "pocket"
SAMPLES, LONG, TEMPERATURE, TOP_K = 20, 250, 0.7, 40
GRAMS = 5  # tokens of the n-grams that it is held against
DETECTORS = (("previous token", "text"), ("first token", "text"), ("induction", "repeated"))  # and the text each is seen on
CARD = """\
# The pocket model

A GPT-2 of {parameters:,} parameters that writes simple English stories. `GPT2.load("pocket")`.

- **Data**: {tokens:,} tokens of stories told by stories15M (https://huggingface.co/karpathy/tinyllamas, MIT), which was
  trained on TinyStories (Eldan and Li 2023); the last {held_out:.0%} were not trained on. It knows nothing else.
- **Licence**: that of regard, MIT.
- **Vocabulary**: {vocabulary:,} pieces, learned from the same stories.
- **Made by** `python -m recipes.pocket --data FOLDER`, in {hours:.1f} hours of training on {machine}, seed {seed}.
- **Held-out text**: {bits:.3f} bits a byte, {loss:.3f} nats a token, each foretold from {known} or more where there are so
  many. A {grams}-gram model of the same tokens, by modified Kneser-Ney smoothing: {counted:.3f} bits, {counted_loss:.3f} nats.

![The losses of the run](curves.png)

## What its heads do

Scores of `regard.heads` at the end of the run; induction on random tokens said twice, the others on a story.

{heads}

![Scores of every head every {every} steps](heads.png)

## Config

```toml
{config}
```

## Twenty stories

Not chosen: seeds 0 to 19, temperature {temperature}, top_k {top_k}, at most {long} tokens.

{samples}
"""


def write(root: Path) -> None:
    """Saves the model of a run, its curves and its card."""
    model, corpus = GPT2.load(root / "run" / "model"), Corpus.load(root / "corpus")
    config = TrainConfig.read(Path(__file__).with_name("pocket.toml"))
    model.to(torch.bfloat16).save(PACKAGE)
    model.to(torch.float32)  # with the numbers that were kept
    seen, held_out = corpus.split(config.held_out)
    text = held_out[:].tolist()
    size = len(corpus.text.bytes(text))
    context = model.config.context
    found = perplexity(model, text, context=context, stride=context // 2, batch=8, bytes=size)
    counted = KneserNey.train(np.asarray(seen[:]), GRAMS, corpus.vocabulary).nats(np.asarray(text))
    log = rows(root / "run" / "log.jsonl")
    said: dict[str, Any] = {
        "parameters": model.config.parameters,
        "tokens": corpus.tokens,
        "held_out": config.held_out,
        "vocabulary": corpus.vocabulary,
        "hours": sum(row["seconds"] for row in log) / 3600,
        "machine": f"{torch.get_num_threads()} threads of a CPU",
        "seed": config.seed,
        "bits": found.bits_per_byte,
        "loss": found.loss_nats,
        "known": context // 2,
        "every": config.observe_every,
        "grams": GRAMS,
        "counted": counted * len(text) / size / math.log(2),
        "counted_loss": counted,
        "heads": heads(rows(root / "run" / "heads.jsonl")),
        "config": Path(__file__).with_name("pocket.toml").read_text(encoding="utf-8").strip(),
        "temperature": TEMPERATURE,
        "top_k": TOP_K,
        "long": LONG,
        "samples": "\n\n".join(f"{n + 1}. {sample(model, n)}" for n in range(SAMPLES)),
    }
    (PACKAGE / "README.md").write_text(CARD.format(**said), encoding="utf-8")
    for picture in ("curves.png", "heads.png"):
        shutil.copyfile(root / "run" / picture, PACKAGE / picture)


def sample(model: GPT2, seed: int) -> str:
    """A story from its first word on."""
    settings = model.ending()
    settings |= {"temperature": TEMPERATURE, "top_k": TOP_K, "seed": seed}
    end = settings["end"]
    tokens = [int(token) for token in model.generate([end], LONG, **settings)]
    story = tokens[: tokens.index(end)] if end in tokens else tokens
    assert model.text is not None
    return model.text.decode(story).strip()


def rows(path: Path) -> list[dict[str, Any]]:
    """The lines of a file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def heads(found: list[dict[str, Any]]) -> str:
    """The best head of each detector, at the last step."""
    last = [row for row in found if row["step"] == found[-1]["step"]]
    lines = ["| detector | head | score |", "|---|---|---|"]
    for detector, on in DETECTORS:
        best = max((row for row in last if row["on"] == on), key=lambda row: row.get(detector, 0.0))
        lines.append(f"| {detector} | {best['layer']}.{best['head']} | {best[detector]:.2f} |")
    return "\n".join(lines)
