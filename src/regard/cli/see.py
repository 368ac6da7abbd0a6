"""Run `regard see`.

Exit code 2 if the model, the image or the settings cannot be used.
"""

import argparse
import re
import time
from typing import Any

import torch
from rich.text import Text
from torch import Tensor

from regard.cli.image_model import ImageModel, find_example, load_image_model
from regard.cli.image_prompt import load_image_prompter
from regard.cli.output_files import check_figure, check_output_file, save_figure
from regard.cli.progress_bar import show_bar
from regard.cli.see_words import MAX_WORDS, compute_pictures, is_path, print_words, record_prompt
from regard.errors import ConfigError
from regard.observe import Recording, record
from regard.observe.places import PatchGrid
from regard.show.image_input import Pixels, load_image
from regard.show.page.single_file import page
from regard.show.patch_summary import render_layers, render_patches
from regard.show.patch_weights import PatchWeights, compute_patch_weights, find_patch_layers
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
    if options.text is not None:
        prompter = load_image_prompter(options.model)
        recording, seen, line, best = record_prompt(prompter, pixels, options.text, options.tokens, bool(options.page))
    else:
        recording, seen, line, best = record_image(load_image_model(options.model), pixels, has_graph=bool(options.page))
    if options.out:  # first: what cannot be shown is in the file
        recording.save(options.out)
        line += f" Saved to {options.out}."
    if options.text is not None:
        shown = compute_pictures(recording, options)
    else:
        layer, head = (None, None) if options.head is None else parse_layer_head(options.head)
        quantity = "rollout" if options.rollout else "weights"
        shown = [compute_patch_weights(recording, layer, head, options.patch, of=quantity)]
    if options.page:
        page(recording, options.page, image=seen, **attribute_class(recording, best))
        line += f" Page: {options.page}."
    if options.figure:
        from regard.show.image_overlay import draw_patch_weights

        save_figure(draw_patch_weights(seen, shown[-MAX_WORDS:]), options.figure)
        line += f" Figure: {options.figure}."
    if options.text is not None:
        print_words(recording, shown, line)
    else:
        print_report(recording, shown[0], line)
    return 0


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
        parse_layer_head(options.head)  # an invalid head is refused before the model runs
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


def record_image(
    foreign: ImageModel, pixels: Pixels, has_graph: bool = False
) -> tuple[Recording, Pixels, str, tuple[str, float, Tensor] | None]:
    """Return the recording of a model on an image, the image as the model saw it, sentences about both, and the class.

    With `has_graph` the values are kept, and the logit of the class has a gradient.
    """
    images, seen = foreign.prepare(pixels)
    start = time.perf_counter()
    layers = int(getattr(foreign.model.config, "num_hidden_layers", 0) or 0)
    keep = "values" if has_graph else None
    running = record(foreign.model, keep=keep)
    with torch.inference_mode(not has_graph), running as recording, show_bar("running", lambda: len(recording.calls), layers):
        output = foreign.run(images[:1])
    seconds = time.perf_counter() - start
    recording.model = foreign.name
    sides = dict.fromkeys(f"{grid.columns} x {grid.rows}" for grid in list_grids(recording))
    height, width = images.shape[2:]
    sentence = f"{width} x {height} pixels as {', then '.join(sides)} patches, in {seconds:.1f} s."
    if len(images) > 1:
        sentence += f" Shown is the first of {len(images)} images that the processor makes of it."
    best = foreign.find_class(output)
    sentence += f" The model says {escape_text(best[0])} ({best[1]:.2f})." if best else ""
    lacks_processor = foreign.processor is None and foreign.name not in INCLUDED
    sentence += " Resized without a processor, numbers from -1 to 1." if lacks_processor else ""
    return recording, seen, sentence, best


def attribute_class(recording: Recording, best: tuple[str, float, Tensor] | None) -> dict[str, Any]:
    """Return the pull on the logit of a class as arguments of regard.page; none without a class or without gradients."""
    if best is None:
        return {}
    try:
        return {"attribution": recording.attribute(best[2]), "number": f"the logit of {best[0]}"}
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
