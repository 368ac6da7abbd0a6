"""Run `regard heads`.

Exit code 2 if the file is not a recording, or if the model cannot be probed.
"""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from rich.text import Text
from torch import Tensor

from regard.cli.input_text import read_text
from regard.cli.look import check_table, print_plain, print_report, select_rows
from regard.cli.model_loading import CAUSAL_LM, TextModel, load_model
from regard.cli.output_files import check_output_file
from regard.cli.progress_bar import iterate_with_bar
from regard.errors import ConfigError, DataError
from regard.mechanism.arguments import check_count
from regard.observe import load
from regard.observe.classification.head_kinds import EFFECT, RETRIEVAL, SUCCESSION, TEXT_EFFECT
from regard.observe.classification.head_scores import PUNCTUATION, SCORES
from regard.observe.head_table import Heads
from regard.observe.score_interval import Score
from regard.probe.probe_heads import FIRST_COLUMNS, probe_heads
from regard.probe.repeated_tokens import SEEDS
from regard.probe.retrieval import LENGTH, MOST_NEW_TOKENS, NeedlePrompt, make_needle_prompts, measure_retrieval
from regard.probe.succession import make_successions, measure_succession
from regard.show.axis_words import choose_map_kind
from regard.show.head_summary import render_kinds, render_sentences, render_table, select_clearest
from regard.show.number_format import format_count
from regard.show.page.single_file import page
from regard.show.terminal import escape_text, open_console, print_lines, print_wrapped

OF_PROBES = ("seeds", "ablate", "by", "text", "haystack")
DOCUMENTS, TOKENS, SHORTEST = 8, 256, 16  # of a text, on which effects are measured; the fewest tokens
OF_RECORDINGS = ("attention", "head", "query", "page")


def run(options: argparse.Namespace) -> int:
    """Classify the heads of a recording or of a model and print."""
    if (options.recording is None) == (options.model is None):
        raise ConfigError("pass a recording, or --model and the name of a model.")
    if options.model is not None:
        refuse_options(options, OF_RECORDINGS, "--{0} shows a recording: leave it out with --model.")
        if options.ablate == "none":
            refuse_options(options, ("by", "text"), "--{0} is of ablated heads: leave it out with --ablate none.")
        check_table(options, list_scores(options))
        return probe_model(options)
    refuse_options(options, OF_PROBES, "--{0} is of a probe: it needs --model.")
    check_table(options)
    check_output_file("--page", options.page)
    recording = load(options.recording)
    kind = choose_map_kind(recording, options.attention)
    q, k = recording.map(0, kind=kind).shape[2:]
    line = f"{format_count(q, 'token')} look{'s' * (q == 1)} at {k:,}." if kind == "cross" else f"{format_count(q, 'token')}."
    if options.page:
        page(recording, options.page)
        line += f" Page: {options.page}."
    print_report(recording, options, line)
    return 0


def refuse_options(options: argparse.Namespace, names: Iterable[str], sentence: str) -> None:
    """Raise ConfigError if one of these options is given."""
    for name in names:
        if getattr(options, name) is not None:
            raise ConfigError(sentence.format(name))


def list_scores(options: argparse.Namespace) -> list[str]:
    """Return the names of the scores that a probe with these options can measure."""
    missing = {*PUNCTUATION, "receiver"}  # of words, which random tokens are not
    missing |= {EFFECT, TEXT_EFFECT} if options.ablate == "none" else set() if options.text else {TEXT_EFFECT}
    missing |= set() if options.haystack else {RETRIEVAL}
    return [name for name in dict.fromkeys((*FIRST_COLUMNS, *SCORES, SUCCESSION, RETRIEVAL)) if name not in missing]


def hide_sentences(foreign: TextModel, haystack: str) -> list[NeedlePrompt]:
    """Return prompts with sentences that are hidden in a text. Raises DataError for a text that is too short."""
    room = LENGTH if foreign.context is None else min(LENGTH, foreign.context - MOST_NEW_TOKENS)
    return make_needle_prompts(foreign, haystack, length=room)


def add_retrieval(table: Heads, foreign: TextModel, prompts: Sequence[NeedlePrompt]) -> Heads:
    """Return the table with the retrieval score of each head, measured on sentences that are hidden in a text."""
    scores, answered = measure_retrieval(
        foreign.model, prompts, lambda prompts, count: iterate_with_bar("hiding sentences", prompts, count)
    )
    rows = tuple(replace(row, scores={**row.scores, RETRIEVAL: scores[row.layer, row.head]}) for row in table)
    note = f"retrieval: {len(prompts)} prompts of {len(prompts[0].tokens)} tokens, {answered} of which the model answered."
    return replace(table, rows=rows, notes=(*table.notes, note))


def add_succession(table: Heads, foreign: TextModel) -> Heads:
    """Return the table with the succession score of each head, if sequences such as the days are tokens of the model."""
    successions = make_successions(foreign)
    if not successions:
        return table
    try:
        scores = measure_succession(foreign.model, successions)
    except ConfigError as error:
        return replace(table, notes=(*table.notes, f"without succession: {error}"))
    unknown = Score(float("nan"))
    rows = tuple(replace(row, scores={**row.scores, SUCCESSION: scores.get((row.layer, row.head), unknown)}) for row in table)
    return replace(table, rows=rows, notes=(*table.notes, f"succession: {len(successions)} steps, such as Monday to Tuesday."))


def cut_text(foreign: TextModel, text: str) -> Tensor:
    """Return the first tokens of a text as documents, (8, 256) or fewer of each. Raises DataError for a short text."""
    ids = foreign.encode(text)
    length = min(TOKENS, foreign.context or TOKENS, len(ids) // DOCUMENTS)
    if length < SHORTEST:
        count = format_count(len(ids), "token")
        raise DataError(f"the text has {count}; to measure effects on it, it needs {DOCUMENTS * SHORTEST}.")
    return torch.tensor(ids[: DOCUMENTS * length]).view(DOCUMENTS, length)


def probe_model(options: argparse.Namespace) -> int:
    """Probe a model and print its heads."""
    seeds = SEEDS if options.seeds is None else check_count("--seeds", options.seeds, 2)
    text, haystack = (None if one is None else read_text(one) for one in (options.text, options.haystack))
    foreign = load_model(options.model, CAUSAL_LM)
    prompts = None if haystack is None else hide_sentences(foreign, haystack)
    settings: dict[str, Any] = {"ablate": options.ablate or "patterns", "by": options.by or "mean"}
    table = probe_heads(
        foreign.model,
        seeds=seeds,
        text=None if text is None else cut_text(foreign, text),
        watch=lambda rows, count: iterate_with_bar("ablating heads", rows, count),
        **settings,
    )
    table = add_succession(table, foreign)
    if prompts is not None:
        table = add_retrieval(table, foreign, prompts)
    shown = select_rows(table, options)
    if print_plain(shown, options):
        return 0
    console = open_console()
    print_wrapped(console, Text(f"{escape_text(foreign.name)}: {format_count(len(table), 'head')}.", style="bold"))
    print_lines(console, render_kinds(table, console.width))
    show_all = options.all or bool(options.kind or options.sort)
    lines = [
        render_table(shown, console.width, show_all, options.sort),
        render_sentences(shown if show_all else select_clearest(shown), console.width),
    ]
    for part in lines:
        print_lines(console, [Text(), *part])
    return 0
