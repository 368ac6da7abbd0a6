"""What the words of a prompt look at in an image: `regard see --text`."""

import argparse
import time
from typing import Any

import torch
from rich.text import Text

from regard.cli.image_prompt import ImagePrompter
from regard.cli.progress_bar import show_bar
from regard.errors import ConfigError, MissingNameError
from regard.observe import Recording, record
from regard.observe.media import WORD_IDS
from regard.observe.part_names import join_names
from regard.observe.places import EMPTY, PatchGrid, describe_wordless_tokens
from regard.show.axis_words import find_word
from regard.show.image_input import Pixels
from regard.show.patch_summary import render_patches
from regard.show.patch_weights import PatchWeights, Query, compute_patch_weights, find_patch_layers
from regard.show.recording_views import parse_layer_head
from regard.show.terminal import escape_text, open_console, print_lines, print_wrapped
from regard.show.terminal_colors import measure_window
from regard.show.word_patches import render_words

MAX_WORDS = 14  # whose pictures are on one sheet


def record_prompt(
    foreign: ImagePrompter, pixels: Pixels, prompt: str, tokens: int, has_graph: bool
) -> tuple[Recording, Pixels, str, Any]:
    """Return the recording of a model on an image and a prompt, the image as the model saw it, sentences, and the next word.

    tokens: how many more the model generates. Their attention is recorded too, but for the last one, which it does not read.
    With `has_graph` and no such tokens, the values are kept and the logit of the next word has a gradient.
    """
    inputs, seen = foreign.prepare(pixels, prompt)
    ids = inputs[WORD_IDS][0].tolist()
    has_graph = has_graph and not tokens
    start = time.perf_counter()
    running = record(foreign.model, keep="values" if has_graph else None)
    with torch.inference_mode(not has_graph), running as recording, show_bar("running", lambda: len(recording.calls), 0):
        written, logits = foreign.run(inputs, tokens)
    seconds = time.perf_counter() - start
    words = foreign.decode([*ids, *written])
    recording.model, recording.tokens = foreign.name, words[: len(ids) + max(len(written) - 1, 0)]
    sentence = f"{len(ids):,} tokens, of the image and the text, in {seconds:.1f} s."
    if logits is None:
        return recording, seen, f"{sentence} It writes “{escape_text(foreign.join(written))}”.", None
    shares = logits.detach().float().softmax(-1)
    best = int(shares.argmax())
    word = foreign.decode([best])[0].strip()
    sentence += f" The likeliest next word is “{escape_text(word)}” ({float(shares[best]):.2f})."
    return recording, seen, sentence, (f"the next word “{word}”", float(shares[best]), logits[best])


def is_path(text: str) -> bool:
    """Return whether --head is the path of a layer, not numbers of a layer and a head."""
    return any(one.isalpha() for one in text)


def find_place(recording: Recording, text: str | None) -> tuple[int, int | None, str | None]:
    """Return the layer, the head and the part of the model that --head names: by numbers in the language model, or by a path.

    By default the last layer of the language model whose keys are patches, and the mean of its heads.
    """
    if text is None:
        return find_patch_layers(recording, "self", None)[-1], None, None
    if text not in recording:
        if is_path(text):
            raise MissingNameError(f"--head is no layer: {text}. Recorded: {join_names(recording.names)}.")
        return *parse_layer_head(text), None
    for part in (*recording.last.parts, None):
        names = recording.layers("self", part)
        if text in names:
            return names.index(text), None, part
    raise ConfigError(f"--head must be a layer of self-attention with softmax weights: {text} is of another kind.")


def choose_queries(
    recording: Recording, options: argparse.Namespace, place: tuple[int, int | None, str | None]
) -> list[Query | None]:
    """Return the words or patches whose attention is shown: the one that was named, or the words that see the image."""
    layer, _, part = place
    if options.patch is not None:
        return [options.patch]
    if options.query is None:
        return [*list_word_tokens(recording, layer, part)] or [None]
    keys = recording.map(layer, part=part).shape[3]
    if keys != len(recording.tokens or ()) or describe_wordless_tokens(recording.axis_places(layer, "self", part)[1], keys):
        raise ConfigError(
            f"--query is a token of the prompt, and the {keys} tokens of {options.head} are others: "
            "pass --patch R,C, or a layer of the language model."
        )
    return [find_word(options.query, [str(one) for one in recording.tokens or ()])[0]]


def list_word_tokens(recording: Recording, layer: int, part: str | None) -> list[int]:
    """Return the queries of a layer that are words; none of a layer whose tokens are not those of the prompt."""
    queries, keys = recording.map(layer, part=part).shape[2:]
    grids = [one for one in recording.axis_places(layer, "self", part)[1] if isinstance(one, PatchGrid)]
    if not grids or keys != len(recording.tokens or ()):
        return []
    cells = torch.stack([grid.locate_tokens(keys)[0] for grid in grids])
    are_words = (cells == EMPTY).all(0)
    return [number for number in are_words.nonzero().flatten().tolist() if number >= keys - queries]


def compute_pictures(recording: Recording, options: argparse.Namespace) -> list[PatchWeights]:
    """Return what each of the queries looks at in the image, without words that do not see it."""
    layer, head, part = place = find_place(recording, options.head)
    of = "rollout" if options.rollout else "weights"
    queries = choose_queries(recording, options, place)
    found = [compute_patch_weights(recording, layer, head, one, part=part, of=of) for one in queries]
    return [one for one in found if not one.values.isnan().all()] or found[-1:]


def print_words(recording: Recording, shown: list[PatchWeights], line: str) -> None:
    """Print a table of the words, and the picture of the last one."""
    console = open_console()
    window = measure_window(console)
    grid = shown[0].grid
    patches = f"{grid.columns} x {grid.rows} patches"
    print_wrapped(console, Text(f"{escape_text(recording.model)}: the image as {patches}. {line}", style="bold"))
    console.print()
    if len(shown) > 1:
        print_lines(console, render_words(shown, window))
        console.print()
    print_lines(console, render_patches(shown[-1], window))
