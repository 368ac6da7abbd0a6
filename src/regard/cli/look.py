"""Run `regard look`.

Exit code 2 if the model, the text or the settings cannot be used.
"""

import argparse
import csv
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from torch import Tensor

from regard.cli import word_pulls
from regard.cli.input_text import read_text
from regard.cli.model_loading import TextModel, load_model
from regard.cli.output_files import check_output_file
from regard.cli.progress_bar import iterate_with_bar, show_bar
from regard.errors import ConfigError
from regard.mechanism.arguments import check_choice
from regard.models import GPT2
from regard.observe import Recording, record
from regard.observe.classification.head_classification import classify_heads, describe_wordless_keys
from regard.observe.classification.head_scores import SCORES, HeadOptions
from regard.observe.classification.repeated_calls import split_calls
from regard.observe.head_table import Head, Heads, find_score
from regard.observe.recorded_runs.run import IMPLICIT, KINDS
from regard.observe.stored_calls.tensor_store import Store
from regard.show import implicit_views, recording_views
from regard.show.axis_words import choose_map_kind, describe_bytes
from regard.show.head_summary import (
    KIND_ORDER,
    render_grids,
    render_kinds,
    render_links,
    render_sentences,
    render_table,
    select_clearest,
)
from regard.show.page.attributions import compute_target
from regard.show.page.effect_finding import find_text_effect
from regard.show.page.model_adapter import copy_to_cpu
from regard.show.page.recording_entry import RecordingEntry
from regard.show.page.single_file import page
from regard.show.terminal import escape_text, get_palette, open_console, print_lines, print_wrapped
from regard.show.terminal_colors import measure_window

MOST_PREDICTED = 256  # tokens of a text whose prediction is measured


def run(options: argparse.Namespace) -> int:
    """Run the model, classify its heads and print."""
    if options.tokens is not None and options.tokens < 1:
        raise ConfigError(f"--tokens must be at least 1, got {options.tokens}.")
    if options.head is not None:
        recording_views.parse_layer_head(options.head)  # an invalid head is refused before the model runs
    check_table(options)
    for flag in ("out", "page"):
        check_output_file(f"--{flag}", getattr(options, flag))
    Store.from_arguments(options.keep, None)  # raises for a --keep that names nothing
    text = read_text(options.text)
    if options.why is not None:
        return word_pulls.run(options, text)
    foreign = load_model(options.model, device=options.device)
    recording, line, effect = record_text(foreign, text, options)
    if options.out:
        recording.save(options.out)
        line += f" Saved to {options.out}."
    if options.page:
        page(recording, options.page)
        line += f" Page: {options.page}."
    print_report(recording, options, line, effect)
    return 0


def record_text(foreign: TextModel, text: str, options: argparse.Namespace) -> tuple[Recording, str, str]:
    """Return the recording of a model on the first tokens of a text, a sentence about it, and what a prediction needs most."""
    ids, words, total = foreign.tokens(text, options.tokens)
    start = time.perf_counter()
    recording = record_ids(foreign, ids, words, options.keep)
    seconds = time.perf_counter() - start
    cut = f" of {total:,}" if len(words) < total else ""
    beyond = foreign.context is not None and len(words) > foreign.context
    note = f" The model's context is {foreign.context:,}." if beyond else ""
    spelled = describe_bytes(words)
    note += f" {spelled}" if spelled else ""
    line = f"{len(words):,}{cut} token{'s' * (total != 1)} in {seconds:.1f} s.{note}"
    return recording, line, "" if is_partial(options) else describe_effect(foreign, ids, words)


def is_partial(options: argparse.Namespace) -> bool:
    """Return whether something else than the overview is printed."""
    return any(getattr(options, name) is not None for name in ("head", "query")) or options.json or options.csv


def describe_effect(foreign: TextModel, ids: Tensor, words: list[str]) -> str:
    """Return what the prediction after a short text loses without one head; empty for a model that predicts no next token."""
    if not (isinstance(foreign.model, GPT2) or getattr(foreign, "can_generate", False)) or len(words) > MOST_PREDICTED:
        return ""
    entry = RecordingEntry("look", record_ids(foreign, ids, words, "values"), ids=ids)
    found = find_text_effect(foreign, entry, lambda: compute_target(foreign, ids, entry, len(words) - 1, None))
    return "" if found is None else " ".join(found.sentences[:2])


def record_ids(foreign: TextModel, ids: Tensor, words: list[str], keep: str | None) -> Recording:
    """Return the recording of a model on tokens (1, t) with their words, and show a bar while it runs."""
    recorder = record(foreign.model, keep=keep)
    with torch.inference_mode(), recorder as recording, show_bar("running", lambda: len(recording.calls), foreign.layers):
        foreign.run(ids)
    recording.model, recording.tokens = foreign.name, words
    return copy_to_cpu(recording, foreign.device)


def print_report(recording: Recording, options: argparse.Namespace, line: str = "", effect: str = "") -> None:
    """Print the requested part of a recording: a head, a row, or an overview.

    Calls of a module that attends several times in one forward, and has no map for all of them, are layers of their own.
    """
    console = open_console()
    recording, notes = split_calls(recording)
    place = None if options.head is None else recording_views.parse_layer_head(options.head)
    kind = choose_map_kind(recording, options.attention)
    line = " ".join(filter(None, (line, describe_kind(recording, kind), *notes)))
    if kind == IMPLICIT:
        print_implicit(console, recording, options, place, line)
        return
    if options.query is not None:
        lines = list(recording_views.render_row(recording, place, options.query, measure_window(console), options.all, kind))
    elif place is not None:
        lines = list(recording_views.render_head(recording, place, measure_window(console), kind))
    else:
        print_overview(console, recording, options, line, kind, effect)
        return
    print_wrapped(console, Text(f"{escape_text(recording.model)}: {line}"))
    print_lines(console, lines)


def print_implicit(
    console: Console, recording: Recording, options: argparse.Namespace, place: tuple[int, int | None] | None, line: str
) -> None:
    """Print a head or a row of the layers without a softmax, or a table of them and the first head of the middle one."""
    refused = next((name for name in ("json", "csv", "kind", "sort") if getattr(options, name)), None)
    if refused is not None:
        raise ConfigError(f"--{refused} is for the table of heads with a softmax, which these layers do not have.")
    window, count = measure_window(console), implicit_views.count_layers(recording)
    if options.query is not None:
        lines = list(implicit_views.render_row(recording, place, options.query, window, options.all))
    else:
        lines = list(implicit_views.render_head(recording, place or (count // 2, 0), window))
    layers = f"{count} layer{'s' * (count != 1)} without a softmax"
    print_wrapped(console, Text(f"{escape_text(recording.model)}: {layers}. {line}".strip(), style="bold"))
    if place is None:
        print_lines(console, [*implicit_views.render_layers(recording, console.width), Text()])
    print_lines(console, lines)
    if place is None:
        hint = "--head L.H shows another head, --head L the mean of a layer, and --query WORD a row of it."
        print_wrapped(console, Text(hint, style="dim"))


def describe_kind(recording: Recording, kind: str) -> str:
    """Return a note on the kind of attention that is shown; empty if there is only self attention."""
    other_kind = next((one for one in KINDS if one != kind and recording.layers(one)), None)
    sentences = ["This is cross attention, of one text to another."] if kind == "cross" else []
    sentences += [f"There is {other_kind} attention too: --attention {other_kind}."] if other_kind and kind in KINDS else []
    implicit = len(recording.last.list_all_visits(IMPLICIT)) if kind != IMPLICIT else 0
    if implicit:
        layers = "One layer has" if implicit == 1 else f"{implicit} layers have"
        sentences.append(f"{layers} no softmax: --attention implicit.")
    others = [one for one in KINDS if recording.layers(one)]
    if kind == IMPLICIT and others:
        sentences.append(f"Layers with a softmax: --attention {' or '.join(others)}.")
    return " ".join(sentences)


def check_table(options: argparse.Namespace, scores: Sequence[str] = SCORES) -> None:
    """Raise ConfigError if the options of the table cannot be used: no kind, none of the scores, or they contradict."""
    if options.kind is not None:
        check_choice("--kind", options.kind, KIND_ORDER)
    if options.sort is not None:
        find_score(options.sort, scores)
    if options.json and options.csv:
        raise ConfigError("--json and --csv are two formats of one table: leave out one of them.")
    of_table = next((name for name in ("json", "csv", "kind", "sort") if getattr(options, name)), None)
    if of_table is not None and (options.head is not None or options.query is not None):
        raise ConfigError(f"--{of_table} is for the table of the heads: leave out --head and --query.")


def select_rows(heads: Heads, options: argparse.Namespace) -> Heads:
    """Return the rows of the kind that --kind names, as --sort sorts them. Raises ConfigError if there are none."""
    if options.kind is not None and not len(heads.select_kind(options.kind)):
        kinds = ", ".join(dict.fromkeys(row.kind for row in heads))
        raise ConfigError(f"no head is of kind {options.kind!r}; the kinds here are {kinds}.")
    shown = heads.select_kind(options.kind) if options.kind else heads
    return shown.sort_by(options.sort) if options.sort else shown


def print_plain(heads: Heads, options: argparse.Namespace) -> bool:
    """Print heads as JSON or CSV if --json or --csv asks for it, and return whether it does."""
    if options.json:
        print(json.dumps(heads.to_dicts(), allow_nan=False))
    elif options.csv:
        lines = [flatten_head(row) for row in heads.to_dicts()]
        writer = csv.DictWriter(sys.stdout, dict.fromkeys(name for line in lines for name in line), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
    return bool(options.json or options.csv)


def flatten_head(row: dict[str, Any]) -> dict[str, Any]:
    """Return a head as one flat line: "induction" is the mean of a score, "induction low" its lower limit."""
    line = {name: row[name] for name in ("layer", "head", "kind", "sentence")}
    for name, score in row["scores"].items():
        line |= {name if part == "mean" else f"{name} {part}": value for part, value in score.items()}
    return line


def print_overview(
    console: Console, recording: Recording, options: argparse.Namespace, line: str, kind: str, effect: str = ""
) -> None:
    """Print what a prediction needs most, the kinds of heads, the words, the table of the heads and their strongest links."""
    names = recording.layers(kind)
    wanted, count = HeadOptions(recording.tokens), len(names) * recording.map(0, kind=kind).shape[1]
    rows: list[Head] = []
    for row in iterate_with_bar("classifying heads", classify_heads(recording, wanted, kind=kind), count):
        if options.sort and not rows:
            Heads((row,)).sort_by(options.sort)  # a score that is not measured here is refused after the first layer
        rows.append(row)
    heads = Heads(tuple(rows), wanted.describe_missing_scores(kind, describe_wordless_keys(recording, kind)))
    shown = select_rows(heads, options)
    if print_plain(shown, options):
        return
    counts = ", ".join(f"{n} {one}{'s' * (n != 1)}" for n, one in ((len(names), "layer"), (len(heads), "head")))
    print_wrapped(console, Text(f"{escape_text(recording.model)}: {counts}. {line}".strip(), style="bold"))
    if effect:
        print_wrapped(console, Text(escape_text(effect)))
        console.print()
    print_lines(console, render_kinds(heads, console.width))
    show_all = options.all or bool(options.kind or options.sort)
    parts = (
        recording_views.render_text(recording, measure_window(console), options.all, kind),
        render_table(shown, console.width, show_all, options.sort),
        render_sentences(shown if show_all else select_clearest(shown), console.width),
        render_links(recording, shown, console.width, kind),
        render_grids(recording, shown if show_all else select_clearest(shown), console.width, get_palette(console), kind),
    )
    for part in parts:
        lines = list(part)
        print_lines(console, [Text(), *lines] if lines else [])
