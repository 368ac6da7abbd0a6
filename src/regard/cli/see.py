"""Run `regard see`.

Exit code 2 if the model, the image or the settings cannot be used.
"""

import argparse
import re
from pathlib import Path
from typing import Any

from rich.text import Text

from regard.cli.image_model import find_example, load_image_model
from regard.cli.image_prompt import load_image_prompter
from regard.cli.image_reader import ImageReader, SeenImage, record_image
from regard.cli.output_files import check_figure, check_output_file, save_figure
from regard.cli.see_words import MAX_WORDS, compute_pictures, describe_layout, find_state, is_path, print_words
from regard.errors import ConfigError
from regard.observe import Recording
from regard.observe.token_places.places import PatchGrid
from regard.show.image_input import load_image
from regard.show.page.image_entry import make_entry
from regard.show.page.single_file import write_file
from regard.show.patch_summary import render_layers, render_patches
from regard.show.patch_weights import PatchWeights, find_patch_layers
from regard.show.recording_views import parse_layer_head
from regard.show.terminal import escape_text, open_console, print_lines, print_wrapped
from regard.show.terminal_colors import measure_window
from regard.weights.vision_weights import INCLUDED

PATCH = re.compile(r"\s*(-?\d{1,6})\s*,\s*(-?\d{1,6})\s*")


def run(options: argparse.Namespace) -> int:
    """Run the model on the image and print what it looks at."""
    options.patch = parse_patch(options.patch)
    check_words(options)
    check_figure(options.figure)
    for flag in ("out", "page"):
        check_output_file(f"--{flag}", getattr(options, flag))
    pixels = load_image(find_example(options.image, options.model))
    reader = load_reader(options)
    seen = record_image(reader, pixels, has_graph=bool(options.page) and not options.tokens)
    line = seen.outcome.sentence if options.text is not None else describe_image(seen, reader)
    if options.out:  # first: what cannot be shown is in the file
        seen.recording.save(options.out)
        line += f" Saved to {options.out}."
    shown = compute_pictures(seen.recording, options)
    if options.page:
        entry = make_entry(seen.recording, image=seen.images, **attribute_best(seen))
        entry.state = find_state(seen.recording, entry.attention_layers, options)
        write_file(entry, Path(options.page))
        line += f" Page: {options.page}."
    if options.figure:
        from regard.show.image_overlay import draw_patch_weights

        save_figure(draw_patch_weights(seen.images[0], shown[-MAX_WORDS:]), options.figure)
        line += f" Figure: {options.figure}."
    if options.text is not None:
        print_words(seen, shown, line)
    else:
        print_report(seen.recording, shown[0], line)
    return 0


def load_reader(options: argparse.Namespace) -> ImageReader:
    """Load the model: with the prompt that it is to read beside the image, or its part that reads images."""
    if options.text is None:
        return load_image_model(options.model)
    return load_image_prompter(options.model, options.text, options.tokens)


def check_words(options: argparse.Namespace) -> None:
    """Raise ConfigError for options of words that contradict, or that need a prompt."""
    if options.tokens < 0:
        raise ConfigError(f"--tokens must be at least 0, got {options.tokens}.")
    if options.text is None:
        if options.query is not None or options.tokens:
            raise ConfigError("--query and --tokens are of words beside the image: pass --text PROMPT.")
    elif not options.text.strip():
        raise ConfigError("--text must be a question about the image, got no words.")
    if options.head is not None and (options.text is None or not is_path(options.head)):
        layer, head = parse_layer_head(options.head)  # an invalid head is refused before the model runs
        if options.rollout and head is not None:
            raise ConfigError(
                f"a rollout is over all heads: name the layer alone, --head {layer}, not {escape_text(options.head)}."
            )
    if options.query is not None and options.patch is not None:
        raise ConfigError("--query is a word and --patch a patch that looks at the image: leave out one of them.")


def parse_patch(text: str | None) -> tuple[int, int] | None:
    """Parse the row and the column of a patch from 3,5. Raises ConfigError for other text."""
    if text is None:
        return None
    found = PATCH.fullmatch(text)
    if found is None:
        raise ConfigError(f"a patch must be given as its row and column, like 3,5; got {text!r}.")
    return int(found[1]), int(found[2])


def describe_image(seen: SeenImage, reader: ImageReader) -> str:
    """Return sentences on what a model of images was given, and on what it said."""
    sides = dict.fromkeys(f"{grid.columns} x {grid.rows}" for grid in list_grids(seen.recording))
    height, width = seen.images[0].shape[:2]
    sentence = f"{width} x {height} pixels as {', then '.join(sides)} patches{describe_layout(seen)}, in {seen.seconds:.1f} s."
    sentence += f" {seen.outcome.sentence}" * bool(seen.outcome.sentence)
    lacks_processor = getattr(reader, "processor", None) is None and reader.name not in INCLUDED
    return sentence + " Resized without a processor, numbers from -1 to 1." * lacks_processor


def attribute_best(seen: SeenImage) -> dict[str, Any]:
    """Return the pull on the logit of what is likeliest as arguments of regard.page; none without one or without gradients."""
    if seen.outcome.best is None:
        return {}
    try:
        return {"attribution": seen.recording.attribute(seen.outcome.best[2]), "number": seen.outcome.best[0]}
    except ConfigError:  # of a kernel whose context has no gradient: the page says what the pull needs
        return {}


def list_grids(recording: Recording) -> list[PatchGrid]:
    """Return the grid of each layer whose tokens are patches. Raises ConfigError if there is none."""
    found = [recording.axis_places(layer)[1][0] for layer in find_patch_layers(recording, "self", None)]
    return [one for one in found if isinstance(one, PatchGrid)]


def print_report(recording: Recording, shown: PatchWeights, line: str) -> None:
    """Print the layers in numbers, and the picture of the query."""
    console = open_console()
    layers = len(recording.layers())
    heads = sorted({recording.map(layer).shape[1] for layer in range(layers)})
    among = " to ".join(map(str, dict.fromkeys((heads[0], heads[-1]))))
    counts = f"{layers} layer{'s' * (layers != 1)} of {among} head{'s' * (heads != [1])}"
    print_wrapped(console, Text(f"{escape_text(recording.model)}: {counts}. {line}", style="bold"))
    console.print()
    print_lines(console, render_layers(recording))
    print_wrapped(console, Text("means over patches and heads; --help explains the columns", style="dim"))
    console.print()
    print_lines(console, render_patches(shown, measure_window(console)))
