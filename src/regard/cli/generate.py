"""Run `regard generate`.

Exit code 2 if the model, the text or the settings cannot be used, 130 after Ctrl-C.
"""

import argparse
import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.text import Text

from regard.cli.arguments.generate import FLAGS, TOKENS
from regard.cli.arguments.look import SMOLLM2
from regard.cli.device import check_device
from regard.cli.input_text import read_text
from regard.errors import ConfigError, DataError
from regard.generate import Settings, choices, complete
from regard.generate.decode import decode_pieces, encode_prompt
from regard.generate.sequence_reader import find_device
from regard.generate.settings import Tokenizer
from regard.malloc import keep_freed_memory
from regard.models import GPT2, TransformersDecoder
from regard.show.terminal import open_console, print_entries, print_wrapped, quote_token
from regard.terminal_escapes import LINES, escape_controls
from regard.text.number_tokenizer import NumberTokenizer
from regard.text.transformers_tokenizer import PromptTokenizer
from regard.weights.gpt2 import is_own_gpt2
from regard.weights.hub import is_model_name

if TYPE_CHECKING:
    from regard.show.generated_tokens import AttendedToken, GeneratedToken, PieceTokenizer


def run(options: argparse.Namespace) -> int:
    """Load the model and print tokens as they are generated."""
    if options.top < 0:
        raise ConfigError(f"--top must be at least 0, got {options.top}.")
    if options.tokens is not None and options.tokens < 0:
        raise ConfigError(f"--tokens must be at least 0, got {options.tokens}.")
    if options.beams > 1 and (options.top or options.look):
        raise ConfigError("a beam search chooses sequences, not tokens: leave out --beams, or --top and --look.")
    prompt = read_text(options.text)
    given: dict[str, Any] = {name: getattr(options, name) for name in (*FLAGS, "seed", "past")}
    Settings(**given, stop=options.stop, text=NumberTokenizer())  # raises for a wrong setting
    keep_freed_memory()  # every layer of a long prompt would request it again
    model, end_settings = load_decoder(options.model, options.device)
    settings = {"text": NumberTokenizer(), **end_settings, **given}
    settings["stop"] = [*settings.get("stop", []), *(options.stop or [])]
    ids, _ = encode_prompt(prompt, Settings(**settings))
    room = TOKENS if options.past == "slide" else max(model.config.context - len(ids) + 1, 1)
    count = min(TOKENS, room) if options.tokens is None else options.tokens
    if options.top or options.look:
        print_choices(model, ids, count, settings, options)
    else:
        print_stream(complete(model, prompt, count, **settings))
    return 0


def load_decoder(name: str, device: str | None) -> tuple[GPT2 | TransformersDecoder, dict[str, Any]]:
    """Load a GPT-2, or a model of transformers that `regard.generate` continues texts with, and its tokenizer and end."""
    path = Path(name).expanduser()
    if is_own_gpt2(name) or (not path.exists() and is_model_name(name)):
        chosen = check_device(device)
        model = GPT2.load(name).to(chosen)
        return model, model.get_end_settings()
    from regard.cli.model_loading import CAUSAL_LM, MODEL_NAMES, TransformersModel, load_model  # not needed by a GPT-2

    if not path.exists() and name != SMOLLM2:
        raise DataError(
            f"{name} is not a file, a folder or the name of a model: the names are {', '.join(MODEL_NAMES)} and owner/model."
        )
    found = load_model(name, CAUSAL_LM, device)
    assert isinstance(found, TransformersModel)
    is_gpt2 = path.is_dir() and getattr(found.model.config, "model_type", "") == "gpt2"  # with a tokenizer of its own
    decoder = GPT2.load(name).to(found.device) if is_gpt2 else TransformersDecoder(found.model)
    ends = found.list_ends()
    return decoder, {"text": PromptTokenizer(found.tokenizer), "end": next(iter(ends), None), "stop": ends}


def print_stream(pieces: Iterator[str]) -> None:
    """Print pieces of text as they come, with control characters escaped."""
    open_console()  # characters that the terminal lacks are shown as ?
    try:
        for piece in pieces:
            sys.stdout.write(escape_controls(piece, LINES))
            sys.stdout.flush()
    finally:
        sys.stdout.write("\n")


def print_choices(
    model: GPT2 | TransformersDecoder, ids: list[int], count: int, settings: dict[str, Any], options: argparse.Namespace
) -> None:
    """Print a line for each new token, with likely alternatives and what it looked at below it; with --look the text first."""
    from regard.show.generated_tokens import describe_tokens, select_last_layers  # a plain run starts without them

    console = open_console()
    text, layers = settings["text"], select_last_layers(model.config.layers)
    found: Iterable[GeneratedToken] = describe_tokens(choices(model, [ids], count, **settings), text, options.top)
    attended: Iterator[list[AttendedToken]] = itertools.repeat([])
    if options.look:
        found = print_story(found, text, Settings(**settings))
        places = f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]} to {layers[-1]}"
        print_wrapped(console, Text(f"looked at: the mean weight over {model.config.heads} heads of {places}", style="dim"))
        print_wrapped(console, Text("beside each token: its probability", style="dim"))
        attended = record_attended(model, [*ids, *(one.token for one in found)], len(ids), layers, text)
    for one, looked in zip(found, attended, strict=False):
        line = Text.assemble((quote_token(one.word), "bold"), f"  {one.probability:.2f}")
        console.print(line, no_wrap=True, overflow="crop")
        if options.top:
            print_entries(console, [f"{value:.2f} {quote_token(word)}" for word, value in one.likeliest], 4, "dim")
        if looked:
            first, *others = format_attended(looked)
            print_entries(console, [f"looked at {first}", *others], 4, "dim")


def record_attended(
    model: GPT2 | TransformersDecoder, ids: list[int], prompt: int, layers: Sequence[int], text: "PieceTokenizer"
) -> Iterator[list["AttendedToken"]]:
    """Record the model on a prompt and what follows it; yield what each token after it attends to, by places in `ids`.

    One forward reads as many tokens as the context holds; each token beyond was chosen after a window of its own, which slides.
    """
    from regard.observe import record
    from regard.show.generated_tokens import list_attended

    context, last = model.config.context, prompt - 1
    for end in range(max(prompt, min(context, len(ids) - 1)), len(ids)):  # the last token was not read
        start = max(end - context, 0)
        read = ids[start:end]
        with torch.no_grad(), record(model, layers=layers) as recording:
            model(torch.tensor([read], device=find_device(model)))
        for attended in list_attended(recording, len(layers), text.pieces(read), last - start):
            yield [replace(near, position=start + near.position) for near in attended]
        last = end


def print_story(tokens: Iterable["GeneratedToken"], text: Tokenizer, options: Settings) -> list["GeneratedToken"]:
    """Print the text of tokens as they come, up to the end of text or a stop string, and an empty line; return the tokens."""
    found: list[GeneratedToken] = []

    def follow() -> Iterator[torch.Tensor]:
        for one in tokens:
            found.append(one)
            yield torch.tensor([one.token])

    print_stream(decode_pieces(follow(), text, options))
    print()
    return found


def format_attended(attended: Sequence["AttendedToken"]) -> Iterator[str]:
    """List weights with their tokens; those that look alike are told apart by their places."""
    alike = [near.word.strip() for near in attended]
    for near in attended:
        place = f" at {near.position:,}" if alike.count(near.word.strip()) > 1 else ""
        yield f"{near.weight:.2f} {quote_token(near.word)}{place}"
