"""Run `regard generate`.

Exit code 2 if the model, the text or the settings cannot be used, 130 after Ctrl-C.
"""

import argparse
import sys
from collections.abc import Iterator
from typing import Any

from rich.text import Text

from regard.cli.arguments.generate import FLAGS, TOKENS
from regard.cli.look import read
from regard.errors import ConfigError
from regard.generate import Settings, choices, complete
from regard.generate.decode import encoded
from regard.models import GPT2
from regard.observe import record
from regard.printable import LINES, escape_controls
from regard.show.telling import last_layers, told
from regard.show.terminal import literal, open_console, write
from regard.text.numbers import Numbers


def run(options: argparse.Namespace) -> int:
    """Load the model and print tokens as they are generated."""
    if options.top < 0:
        raise ConfigError(f"--top must be at least 0, got {options.top}.")
    prompt = read(options.text)
    model = GPT2.load(options.model)
    settings = {name: getattr(options, name) for name in (*FLAGS, "seed", "stop", "past")}
    settings = {"text": Numbers(), **model.ending(), **settings}
    ids, _ = encoded(prompt, Settings(**settings))
    room = TOKENS if options.past == "slide" else max(model.config.context - len(ids) + 1, 1)
    count = min(TOKENS, room) if options.tokens is None else options.tokens
    if options.top or options.look:
        tell(model, ids, count, settings, options)
    else:
        stream(complete(model, prompt, count, **settings))
    return 0


def stream(pieces: Iterator[str]) -> None:
    """Print pieces of text as they come, with control characters escaped."""
    open_console()  # characters that the terminal lacks are shown as ?
    try:
        for piece in pieces:
            sys.stdout.write(escape_controls(piece, LINES))
            sys.stdout.flush()
    finally:
        sys.stdout.write("\n")


def tell(model: GPT2, ids: list[int], count: int, settings: dict[str, Any], options: argparse.Namespace) -> None:
    """Print a line for each new token, with likely alternatives and what it looked at below it."""
    console = open_console()
    layers = last_layers(model.config.layers)
    if options.look:
        places = f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]} to {layers[-1]}"
        write(console, Text(f"looked at: the mean weight over {model.config.heads} heads of {places}", style="dim"))
    words = settings["text"].pieces(ids)
    with record(model, layers=layers if options.look else []) as recording:
        steps = choices(model, [ids], count, **settings)
        for one in told(steps, words, settings["text"], options.top, recording if options.look else None, len(layers)):
            line = Text.assemble((quoted(one.word), "bold"), f"  {one.probability:.2f}")
            console.print(line, no_wrap=True, overflow="crop")
            if options.top:
                shown = "  ".join(f"{value:.2f} {quoted(word)}" for word, value in one.likeliest)
                write(console, Text(f"    {shown}", style="dim"), hang=4)
            if options.look:
                shown = "  ".join(f"{near.weight:.2f} {quoted(near.word)}" for near in one.looked)
                write(console, Text(f"    looked at {shown}", style="dim"), hang=4)


def quoted(word: str) -> str:
    """Quote a token, so that its spaces are visible."""
    return f"'{literal(word)}'"
