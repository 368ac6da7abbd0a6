"""The pocket model into the package, in bfloat16, with its card: what it was made of, what it can do, and what its heads do."""

import json
import math
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

import regard
from recipes.pocket.lists import whole_words
from recipes.pocket.ngram import KneserNey
from regard.evaluate import perplexity
from regard.models import GPT2
from regard.observe.heads import Head, Heads
from regard.show import curves
from regard.text.corpus import Corpus
from regard.train import TrainConfig

PACKAGE = Path(__file__).parents[2] / "src" / "regard" / "weights" / "pocket"
CONFIGS = Path(__file__).with_name("pocket.toml"), Path(__file__).with_name("heads.toml")
SAMPLES, LONG, TEMPERATURE, TOP_K = 20, 250, 0.7, 40
GRAMS = 5  # tokens of the n-grams that it is held against
DETECTORS = ("previous token", "first token", "induction")
SEEN, DICE = 128, 0  # tokens of a text that heads are seen on, and the seed of its words
CARD = """\
# The pocket model

A GPT-2 of {parameters:,} parameters that writes simple English stories. `GPT2.load("pocket")`.

- **Data**: {tokens:,} tokens of stories told by stories15M (https://huggingface.co/karpathy/tinyllamas, MIT), which was
  trained on TinyStories (Eldan and Li 2023); the last {held_out:.0%} were not trained on. Then {again:,} more: the stories
  of the end once more, and between them lists of words, each said two to four times. It knows nothing else.
- **Licence**: that of regard, MIT.
- **Vocabulary**: {vocabulary:,} pieces, learned from the same stories.
- **Made by** `python -m recipes.pocket --data FOLDER`, in {hours:.1f} hours of training on {machine}, seed {seed}:
  {first:,} steps on stories, and {second:,} on stories and lists, from which heads learn to look back.
- **Held-out text**: {bits:.3f} bits a byte, {loss:.3f} nats a token, each foretold from {known} or more where there are so
  many. A {grams}-gram model of the same tokens, by modified Kneser-Ney smoothing: {counted:.3f} bits, {counted_loss:.3f} nats.

![The losses of the first run](curves.png)

## What its heads do

Scores of `regard.heads` on three texts of {seen} tokens, each after the token of the end of text: words at random, {half} of
them said twice, and a story that was not trained on. Of each detector the head with the highest score of all.

{heads}

![Scores of every head every {every} steps of the second run, on random tokens said twice](heads.png)

## Config

```toml
{config}
```

```toml
{config_again}
```

## Twenty stories

Not chosen: seeds 0 to 19, temperature {temperature}, top_k {top_k}, at most {long} tokens.

{samples}
"""


def write(root: Path) -> None:
    """Saves the model of the second run, the first one's curves, the second one's heads, and the card."""
    model, corpus = GPT2.load(root / "second" / "model"), Corpus.load(root / "corpus")
    config, again = (TrainConfig.read(path) for path in CONFIGS)
    model.to(torch.bfloat16).save(PACKAGE)
    model.to(torch.float32)  # with the numbers that were kept
    seen, held_out = corpus.split(config.held_out)
    text = held_out[:].tolist()
    size = len(corpus.text.bytes(text))
    context = model.config.context
    found = perplexity(model, text, context=context, stride=context // 2, batch=8, bytes=size)
    counted = KneserNey.train(np.asarray(seen[:]), GRAMS, corpus.vocabulary).nats(np.asarray(text))
    log = [row for run in ("run", "second") for row in rows(root / run / "log.jsonl")]
    formed = rows(root / "second" / "heads.jsonl")
    said: dict[str, Any] = {
        "parameters": model.config.parameters,
        "tokens": corpus.tokens,
        "again": Corpus.load(root / "mixed").tokens,
        "held_out": config.held_out,
        "vocabulary": corpus.vocabulary,
        "hours": sum(row["seconds"] for row in log) / 3600,
        "machine": f"{torch.get_num_threads()} threads of a CPU",
        "seed": config.seed,
        "first": config.steps,
        "second": again.steps,
        "bits": found.bits_per_byte,
        "loss": found.loss_nats,
        "known": context // 2,
        "every": again.observe_every,
        "grams": GRAMS,
        "counted": counted * len(text) / size / math.log(2),
        "counted_loss": counted,
        "heads": heads(model, text),
        "seen": SEEN,
        "half": SEEN // 2,
        "config": CONFIGS[0].read_text(encoding="utf-8").strip(),
        "config_again": CONFIGS[1].read_text(encoding="utf-8").strip(),
        "temperature": TEMPERATURE,
        "top_k": TOP_K,
        "long": LONG,
        "samples": "\n\n".join(f"{n + 1}. {sample(model, n)}" for n in range(SAMPLES)),
    }
    (PACKAGE / "README.md").write_text(CARD.format(**said), encoding="utf-8")
    shutil.copyfile(root / "run" / "curves.png", PACKAGE / "curves.png")
    curves.save(curves.formation(formed, detectors=[(detector, "repeated") for detector in DETECTORS]), PACKAGE / "heads.png")


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


def heads(model: GPT2, story: list[int]) -> str:
    """The best head of each detector, and its scores on every text."""
    texts = {"words": words(model, SEEN, 1), "words twice": words(model, SEEN // 2, 2), "a story": opening(model, story)}
    found = {name: typed(model, tokens) for name, tokens in texts.items()}
    lines = [f"| detector | head | {' | '.join(texts)} |", f"|---|---|{'---|' * len(texts)}"]
    for detector in DETECTORS:
        best = max((row for table in found.values() for row in table), key=lambda row: np.nan_to_num(row.scores[detector]))
        scores = [shown(row.scores[detector]) for table in found.values() for row in table if place(row) == place(best)]
        lines.append(f"| {detector} | {best.layer}.{best.head} | {' | '.join(scores)} |")
    return "\n".join(lines)


def shown(score: float) -> str:
    """A score, or nothing where a text has none: no word of it comes again."""
    return "" if math.isnan(score) else f"{score:.2f}"


def place(row: Head) -> tuple[int, int]:
    """Which head a row is of."""
    return row.layer, row.head


def typed(model: GPT2, tokens: list[int]) -> Heads:
    """Every head's scores on a text."""
    with torch.no_grad(), regard.record(model) as recording:
        model(torch.tensor([tokens]))
    return regard.heads(recording, tokens=torch.tensor([tokens]), classes={})


def words(model: GPT2, count: int, times: int) -> list[int]:
    """The end of text, then so many different words at random, so many times."""
    assert model.text is not None
    known = random.Random(DICE).sample(whole_words(model.text), count)
    return [model.ending()["end"], *model.text.encode("".join(known * times))]


def opening(model: GPT2, story: list[int]) -> list[int]:
    """The end of text, and the first story that is whole in a row of tokens."""
    begins = story.index(model.ending()["end"])
    return story[begins : begins + SEEN]
