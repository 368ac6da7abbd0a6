"""Which pictures `regard see` shows: the layer, the words or patches that look at the image, and a table of words."""

import argparse
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from regard.cli.image_reader import SeenImage
from regard.errors import ConfigError, MissingNameError
from regard.observe import Recording
from regard.observe.recorded_runs.part_names import join_names
from regard.observe.recorded_runs.run import KINDS
from regard.observe.token_places.places import CROSS, PatchGrid, describe_wordless_tokens
from regard.show.axis_words import find_word
from regard.show.page.recording_entry import AttentionLayers
from regard.show.patch_summary import render_patches
from regard.show.patch_weights import PatchWeights, Query, compute_patch_weights, find_patch_layers, has_patches
from regard.show.recording_views import parse_layer_head
from regard.show.terminal import escape_text, open_console, print_lines, print_wrapped
from regard.show.terminal_colors import measure_window
from regard.show.word_patches import render_words

MAX_WORDS = 14  # whose pictures are on one sheet


@dataclass(frozen=True)
class LayerPlace:
    """A layer of a recording by its number, kind and part, and a head; None is the mean of its heads."""

    layer: int
    head: int | None = None
    kind: str = "self"
    part: str | None = None


def is_path(text: str) -> bool:
    """Return whether --head is the path of a layer, not numbers of a layer and a head."""
    return any(one.isalpha() for one in text)


def find_place(recording: Recording, text: str | None) -> LayerPlace:
    """Return the layer and the head that --head names: by numbers among the layers whose words look at patches, or by a path.

    By default the last of these layers, and the mean of its heads. Of an image without words they are those of its patches.
    """
    if text is not None and is_path(text):
        if text not in recording:
            raise MissingNameError(f"--head is no layer: {text}. Recorded: {join_names(recording.names)}.")
        return find_named_place(recording, text)
    kind, part = find_worded_layers(recording)
    if text is not None:
        return LayerPlace(*parse_layer_head(text), kind, part)
    return LayerPlace(find_patch_layers(recording, kind, part)[-1], None, kind, part)


def find_named_place(recording: Recording, name: str) -> LayerPlace:
    """Return the layer with this path. Raises ConfigError if it has no softmax weights."""
    for part in (*recording.last.parts, None):
        for kind in KINDS:
            names = recording.layers(kind, part)
            if name in names:
                return LayerPlace(names.index(name), None, kind, part)
    raise ConfigError(f"--head must be a layer with softmax weights: {name} is of another kind.")


def find_worded_layers(recording: Recording) -> tuple[str, str | None]:
    """Return the kind and the part of the layers in which words look at patches: of a decoder that writes, its cross attention.

    Raises ConfigError if the recording has words and none of them looks at a patch.
    """
    if recording.tokens is None:
        return "self", None
    parts = (None, *recording.last.parts)
    for kind, part in ((kind, part) for kind in KINDS for part in parts):
        layers = [n for n in range(len(recording.layers(kind, part))) if has_patches(recording, n, kind, part, 0)]
        if any(list_word_tokens(recording, LayerPlace(n, None, kind, part)) for n in layers):
            return kind, part
    raise ConfigError(describe_unseeing_words(recording))


def describe_unseeing_words(recording: Recording) -> str:
    """Describe that no word looks at a patch, and which layers look at some."""
    parts = (None, *recording.last.parts)
    layers = [
        name
        for part in parts
        for kind in KINDS
        for n, name in enumerate(recording.layers(kind, part))
        if has_patches(recording, n, kind, part, 0)
    ]
    message = "no word looks at tokens that are known as patches: the model makes other tokens of the image, such as queries "
    message += "that it learned, pooled or averaged ones, before the words see it."
    if not layers:
        return f"{message} Record it in Python and set recording.places = regard.PatchGrid(...)."
    return (
        f"{message} Its patches are seen by other layers: leave out --text, or pass --head {[*dict.fromkeys(layers)][-1]}. "
        "If you know which tokens are patches, record it in Python and set recording.places = regard.PatchGrid(...)."
    )


def choose_queries(recording: Recording, options: argparse.Namespace, place: LayerPlace) -> list[Query | None]:
    """Return the words or patches whose attention is shown: the one that was named, or the words that see the image."""
    if options.patch is not None:
        return [options.patch]
    if options.query is None:
        return [*list_word_tokens(recording, place)] or [None]
    words = list_words(recording, place)
    if not words:
        keys = recording.map(place.layer, kind=place.kind, part=place.part).shape[3]
        raise ConfigError(
            f"--query is a token of the prompt, and the {keys} tokens of {options.head} are others: "
            "pass --patch R,C, or a layer of the language model."
        )
    return [find_word(options.query, words)[0]]


def list_words(recording: Recording, place: LayerPlace) -> list[str]:
    """Return the words of the queries of a layer, from those of its keys on in self-attention; none if they are not words."""
    queries, keys = recording.map(place.layer, kind=place.kind, part=place.part).shape[2:]
    words = recording.words(place.layer, place.kind, place.part)[place.kind != CROSS] or ()
    size = queries if place.kind == CROSS else keys
    asking, answering = recording.axis_places(place.layer, place.kind, place.part)
    is_wordless = describe_wordless_tokens(asking if place.kind == CROSS else answering, size)
    return [str(one) for one in words] if len(words) == size and not is_wordless else []


def list_word_tokens(recording: Recording, place: LayerPlace) -> list[int]:
    """Return the queries of a layer that are words; none of a layer whose tokens are not those of the prompt.

    Tokens between the patches of the image, such as the ends of its rows, are not among them.
    """
    if not list_words(recording, place):
        return []
    queries, keys = recording.map(place.layer, kind=place.kind, part=place.part).shape[2:]
    if place.kind == CROSS:
        return [*range(queries)]
    answering = recording.axis_places(place.layer, place.kind, place.part)[1]
    grids = [one for one in answering if isinstance(one, PatchGrid)]
    if not grids:
        return []
    starts = [grid.find_start(keys) for grid in grids]
    inside = range(min(starts), max(start + grid.length for start, grid in zip(starts, grids, strict=True)))
    return [number for number in range(keys - queries, keys) if number not in inside]


def compute_pictures(recording: Recording, options: argparse.Namespace) -> list[PatchWeights]:
    """Return what each of the queries looks at in the image, without words that do not see it."""
    place = find_place(recording, options.head)
    of = "rollout" if options.rollout else "weights"
    queries = choose_queries(recording, options, place)
    settings: dict[str, Any] = {"kind": place.kind, "part": place.part, "of": of}
    found = [compute_patch_weights(recording, place.layer, place.head, one, **settings) for one in queries]
    return [one for one in found if not one.values.isnan().all()] or found[-1:]


def find_state(recording: Recording, layers: list[AttentionLayers], options: argparse.Namespace) -> dict[str, Any] | None:
    """Return where a page with these layers opens: the layer and the word that --head and --query name; None without a word."""
    if options.query is None:
        return None
    place = find_place(recording, options.head)
    (token,) = choose_queries(recording, options, place)
    name = recording.layers(place.kind, place.part)[place.layer]
    for one in layers:
        if isinstance(token, int) and one.kind == place.kind and name in one.names:
            layer = one.names.index(name)
            q, k = one.shapes[layer][2:]
            query = token if place.kind == CROSS else token - (k - q)
            return {"kind": one.kind, "part": one.part if len(layers) > 1 else None, "layer": layer, "q": query}
    return None


def print_words(seen: SeenImage, shown: list[PatchWeights], line: str) -> None:
    """Print a table of the words, and the picture of the last one."""
    console = open_console()
    window = measure_window(console)
    grid = shown[0].grid
    patches = f"{grid.columns} x {grid.rows} patches{describe_layout(seen)}"
    print_wrapped(console, Text(f"{escape_text(seen.recording.model)}: the image as {patches}. {line}", style="bold"))
    console.print()
    if len(shown) > 1:
        print_lines(console, render_words(shown, window))
        console.print()
    print_lines(console, render_patches(shown[-1], window))


def describe_layout(seen: SeenImage) -> str:
    """Return the tiles of an image in words, or how many images there are of which the first is shown; "" for one image."""
    if seen.prepared.layout is not None:
        return f", {seen.prepared.layout.describe()}"
    return f", the first of {len(seen.prepared.tiles)} images that the processor makes of it" * (len(seen.prepared.tiles) > 1)
