"""Run `regard look TEXT --why [WORD]`: the words of the text that moved the logit of the next word, beside those looked at."""

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
from rich.text import Text
from torch import Tensor

from regard.cli.model_loading import CAUSAL_LM, TextModel, load_model
from regard.cli.progress_bar import show_bar
from regard.errors import ConfigError
from regard.observe.record import record
from regard.observe.text_table import align_columns, format_token
from regard.show.terminal import escape_text, open_console, print_wrapped, quote_token
from regard.show.word_pulls import WordPull, compute_pulls

SHOWN = 10  # words
WORD_LETTERS = 14


@torch.enable_grad()
def run(options: argparse.Namespace, text: str) -> int:
    """Run the model with gradients and print which words moved the logit."""
    refused = [
        name for name in ("out", "page", "head", "query", "kind", "sort", "attention", "csv", "keep") if getattr(options, name)
    ]
    if refused:
        raise ConfigError(f"--why prints its own table: leave out --{refused[0]}.")
    foreign = load_model(options.model, CAUSAL_LM, options.device)
    ids, words, _ = foreign.tokens(text, options.tokens)
    with record(foreign.model, keep="values") as recording, show_bar("running", lambda: len(recording.calls), foreign.layers):
        found = foreign.run(ids)
    logits = getattr(found, "logits", found)
    if not isinstance(logits, Tensor) or logits.dim() != 3 or not recording.calls:
        raise ConfigError(f"--why needs a model that predicts the next token, and {foreign.name} does not.")
    last = logits[0, -1]
    token = choose_token(foreign, last.detach(), options.why)
    probability = float(last.detach().float().softmax(-1)[token])
    rows = compute_pulls(recording.attribute(last[token]), words)
    word = foreign.decode([token])
    if options.json:
        pulls = [replace_nonfinite(asdict(row)) for row in rows]
        print(json.dumps({"word": word, **replace_nonfinite({"probability": probability}), "words": pulls}, allow_nan=False))
        return 0
    print_pulls(rows, foreign.name, word, float(last[token].detach()), probability, options.all)
    return 0


def replace_nonfinite(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with None in place of NaN and the infinities, which are not JSON."""
    return {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in row.items()}


def choose_token(foreign: TextModel, logits: Tensor, word: str) -> int:
    """Return the token of a word, or the likeliest one for an empty word. Raises ConfigError for more than one token."""
    if not word:
        return int(logits.argmax())
    spellings = [foreign.encode(spelling) for spelling in (f" {word}", word)]  # a word after others begins with a blank
    single = [ids[0] for ids in spellings if len(ids) == 1]
    if not single:
        parts = ", ".join(repr(foreign.decode([one])) for one in spellings[0])
        raise ConfigError(f"--why takes one token, and {word!r} is {len(spellings[0])} for this model: {parts}.")
    return single[0]


def print_pulls(rows: list[WordPull], model: str, word: str, logit: float, probability: float, show_all: bool) -> None:
    """Print the words with the largest pulls, and what the columns are."""
    console = open_console()
    intro = (
        f"{escape_text(model)}: {len(rows):,} token{'s' * (len(rows) != 1)}. The next token {quote_token(word)} has the logit "
        f"{logit:.2f}, probability {probability:.2f}."
    )
    print_wrapped(console, Text(intro, style="bold"))
    console.print()
    print_wrapped(console, Text("What moved the logit, and where the last token looked:", style="bold"))
    for line in render_table(rows if show_all else rows[:SHOWN]):
        console.print(Text(line), no_wrap=True, overflow="crop")
    note = (
        "pull: weight times gradient over all heads and queries, above 0 where it moved the logit up, a first-order estimate. "
        "looked: the weight of the last token, mean over all heads. most by: the head with the largest part of the pull."
    )
    print_wrapped(console, Text(note, style="dim"))


def render_table(rows: list[WordPull]) -> Iterator[str]:
    """Yield the lines of the table."""
    cells = [
        (
            str(row.position),
            format_token(row.word.strip() or row.word, WORD_LETTERS),
            f"{row.pull:+.2f}",
            f"{row.weight:.2f}",
            f"{row.head}",
        )
        for row in rows
    ]
    yield from align_columns(("", "token", "pull", "looked", "most by"), cells, ("token", "most by"))
