"""The card of the pocket model: its data, its training, its loss on held-out text, its heads, and twenty stories."""

import json
import math
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

import regard
from recipes.pocket.lists import list_whole_words
from recipes.pocket.ngram import KneserNey
from regard.evaluate import perplexity
from regard.models import GPT2
from regard.observe.head_table import Heads
from regard.show import training_curves
from regard.text.corpus import Corpus
from regard.train import TrainConfig

PACKAGE = Path(__file__).parents[2] / "src" / "regard" / "weights" / "pocket"
CONFIGS = tuple(Path(__file__).with_name(name) for name in ("pocket.toml", "heads.toml", "temperatures.toml"))
RUNS = ("run", "second", "third")
SAMPLES, LONG, TEMPERATURE, TOP_K = 20, 250, 0.7, 40
GRAMS = 5  # tokens of the n-grams of the model that it is compared with
DETECTORS = ("previous token", "first token", "induction")
FORMED = tuple((name, "repeated") for name in ("previous token", "first token", "induction", "copying"))
HEAD_TOKENS, HEAD_SEED = 128, 0  # tokens of a text on which heads are scored, and the seed of its words
CARD = """\
# The pocket model

A GPT-2 of {parameters:,} parameters that writes simple English stories. `GPT2.load("pocket")`.

- **Data**: stories sampled from stories15M (https://huggingface.co/karpathy/tinyllamas, MIT), which was trained on TinyStories
  (Eldan and Li 2023), in three runs: {tokens:,} tokens of its likeliest words (temperature 1, top_k 40, top_p 0.9); the last
  of these stories again with lists between them, random words repeated two to four times, {lists:,} tokens; and {varied:,}
  tokens of stories sampled at temperatures 0.7, 0.8, 0.9 and 1, with fewer lists. It was trained on nothing else.
- **License**: that of regard, MIT.
- **Vocabulary**: {vocabulary:,} pieces, learned from the same stories.
- **Training**: `python -m recipes.pocket --data FOLDER`, {hours:.1f} hours on two threads of a CPU, seed {seed}: {steps} steps.
- **Held-out text**, each token predicted from at least {known} others where there are that many:

| stories sampled at | bits a byte | nats a token | a {grams}-gram model, bits a byte |
|---|---|---|---|
{losses}

The {grams}-gram model counts the tokens of the same training text (modified Kneser-Ney smoothing).

![The losses of the first run](curves.png)

## What its heads do

Scores of `regard.heads` on three texts of {count} tokens, each after the token of the end of text: random words, {half} random
words repeated once, and a held-out story. For each detector, the head with the highest score of all.

{heads}

![Scores of every head every {every} steps of the second run, on repeated random tokens](heads.png)

## Config

{configs}

## Twenty stories

Not selected: seeds 0 to 19, temperature {temperature}, top_k {top_k}, at most {long} tokens.

{samples}
"""


def write_card(root: Path) -> None:
    """Save the model of the third run in bfloat16, the first run's curves, the second run's heads, and the card."""
    model, configs = GPT2.load(root / "third" / "model"), [TrainConfig.read(path) for path in CONFIGS]
    model.to(torch.bfloat16).save(PACKAGE)
    model.to(torch.float32)  # with the numbers that were saved
    likeliest, varied = (Corpus.load(root / name) for name in ("corpus", "varied"))
    log = [row for run in RUNS for row in read_rows(root / run / "log.jsonl")]
    values: dict[str, Any] = {
        "parameters": model.config.parameters,
        "tokens": likeliest.tokens,
        "lists": Corpus.load(root / "lists").tokens,
        "varied": varied.tokens,
        "vocabulary": likeliest.vocabulary,
        "hours": sum(row["seconds"] for row in log) / 3600,
        "seed": configs[0].seed,
        "steps": ", then ".join(f"{config.steps:,}" for config in configs),
        "known": model.config.context // 2,
        "every": configs[1].observe_every,
        "grams": GRAMS,
        "losses": "\n".join(
            [
                describe_losses("temperature 1, top_k 40, top_p 0.9", model, likeliest, configs[0].held_out),
                describe_losses("temperatures 0.7, 0.8, 0.9 and 1", model, varied, configs[2].held_out),
            ]
        ),
        "heads": format_head_table(model, likeliest.split(configs[0].held_out)[1][:].tolist()),
        "count": HEAD_TOKENS,
        "half": HEAD_TOKENS // 2,
        "configs": "\n\n".join(f"```toml\n{path.read_text(encoding='utf-8').strip()}\n```" for path in CONFIGS),
        "temperature": TEMPERATURE,
        "top_k": TOP_K,
        "long": LONG,
        "samples": "\n\n".join(f"{n + 1}. {sample_story(model, n)}" for n in range(SAMPLES)),
    }
    (PACKAGE / "README.md").write_text(CARD.format(**values), encoding="utf-8")
    shutil.copyfile(root / "run" / "curves.png", PACKAGE / "curves.png")
    training_curves.save_picture(
        training_curves.draw_head_formation(read_rows(root / "second" / "heads.jsonl"), detectors=FORMED),
        PACKAGE / "heads.png",
    )


def describe_losses(name: str, model: GPT2, corpus: Corpus, held_out: float) -> str:
    """Return a row of the card: the loss on a corpus's held-out tokens, and that of an n-gram model of its other tokens."""
    train, rest = corpus.split(held_out)
    text = rest[:].tolist()
    size, context = len(corpus.text.bytes(text)), model.config.context
    loss = perplexity(model, text, context=context, stride=context // 2, batch=8, bytes=size)
    counted = KneserNey.train(np.asarray(train[:]), GRAMS, corpus.vocabulary).compute_mean_nats(np.asarray(text))
    bits = counted * len(text) / size / math.log(2)
    return f"| {name} | {loss.bits_per_byte:.3f} | {loss.loss_nats:.3f} | {bits:.3f} |"


def sample_story(model: GPT2, seed: int) -> str:
    """Return a story, sampled from its first word on."""
    settings = model.get_end_settings()
    settings |= {"temperature": TEMPERATURE, "top_k": TOP_K, "seed": seed}
    end = settings["end"]
    tokens = [int(token) for token in model.generate([end], LONG, **settings)]
    story = tokens[: tokens.index(end)] if end in tokens else tokens
    assert model.text is not None
    return model.text.decode(story).strip()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read a file of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def format_head_table(model: GPT2, story: list[int]) -> str:
    """Return a table of the best head of each detector, with its scores on every text."""
    texts = {
        "words": make_words(model, HEAD_TOKENS, 1),
        "words twice": make_words(model, HEAD_TOKENS // 2, 2),
        "a story": get_first_story(model, story),
    }
    found = {name: score_heads(model, tokens) for name, tokens in texts.items()}
    lines = [f"| detector | head | {' | '.join(texts)} |", f"|---|---|{'---|' * len(texts)}"]
    for detector in DETECTORS:
        best = max((row for table in found.values() for row in table), key=lambda row: np.nan_to_num(row.scores[detector]))
        scores = [
            format_score(row.scores[detector])
            for table in found.values()
            for row in table
            if (row.layer, row.head) == (best.layer, best.head)
        ]
        lines.append(f"| {detector} | {best.layer}.{best.head} | {' | '.join(scores)} |")
    return "\n".join(lines)


def format_score(score: float) -> str:
    """Format a score; empty where a text has none, because no word of it is repeated."""
    return "" if math.isnan(score) else f"{score:.2f}"


def score_heads(model: GPT2, tokens: list[int]) -> Heads:
    """Compute the scores of every head on a text."""
    with torch.no_grad(), regard.record(model) as recording:
        model(torch.tensor([tokens]))
    return regard.heads(recording, tokens=torch.tensor([tokens]), classes={})


def make_words(model: GPT2, count: int, times: int) -> list[int]:
    """Return the token of the end of text, then `count` different random words, repeated `times` times."""
    assert model.text is not None
    known = random.Random(HEAD_SEED).sample(list_whole_words(model.text), count)
    return [model.get_end_settings()["end"], *model.text.encode("".join(known * times))]


def get_first_story(model: GPT2, story: list[int]) -> list[int]:
    """Return the first story that begins in a row of tokens, with the token of the end of text before it."""
    begins = story.index(model.get_end_settings()["end"])
    return story[begins : begins + HEAD_TOKENS]
