"""Run `regard translate`.

Exit code 2 if the model, the files or the settings cannot be used; with --train those of `regard train`.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import Any

from regard.cli import train
from regard.cli.arguments.translate import MODEL
from regard.cli.input_text import BYTE_ORDER_MARK, FILE_NAME_PATTERN
from regard.cli.progress_bar import show_count_bar
from regard.errors import ConfigError, DataError
from regard.evaluate.translation_scores import BLOCK, bleu, chrf, translate_sentences
from regard.models import translator
from regard.show.terminal import open_console
from regard.terminal_escapes import escape_controls
from regard.text.pairs.sources import read_text
from regard.train import TrainConfig
from regard.train.config import TEXT_SETTINGS, read_table

DEFAULTS: dict[str, Any] = {"vocabulary": "4000", "label_smoothing": 0.1, "model": {"kind": "transformer", "dropout": 0.1}}
FIELDS = [one.name for one in fields(TrainConfig) if one.name not in ("model", *TEXT_SETTINGS)]
SEARCH = ("beams", "length_penalty")
SIZES = {
    "kind": "of model: transformer, or recurrent",
    "attention": "of a recurrent one: additive; none by default",
    "width": "width of a word's vector",
    "hidden": "width of a recurrent state",
    "layers": "layers of the encoder, and of the decoder",
    "heads": "heads per layer of a transformer",
    "inner": "width of a transformer's feed-forward layers; four times the width by default",
    "cell": "of a recurrent one: gru, or lstm",
    "norm": "of a transformer: post, as in 2017, or pre",
    "dropout": "the share of numbers that are zeroed in training",
    "tied": "source, target and logits share one embedding",
    "context": "the most tokens that a transformer reads",
}


def run(options: argparse.Namespace) -> int:
    """Train, evaluate or translate."""
    settings_given = [name for name in (*FIELDS, *SIZES) if name in vars(options)] + ["config"] * (options.config is not None)
    modes = {"sentences": bool(options.sentences), "--lines": options.lines, "--evaluate": bool(options.evaluate)}
    modes["--train"] = options.train
    if sum(modes.values()) != 1:
        both = " and ".join(name for name, given in modes.items() if given)
        raise ConfigError(f"give one of {', '.join(modes)}; got {both or 'none'}.")
    given = {name: value for name in ("model", *SEARCH) if (value := getattr(options, name)) is not None}
    if options.train:
        if given:
            raise ConfigError(f"--{next(iter(given)).replace('_', '-')} is a setting of translating, not of --train.")
        return train.train_model(make_config(options))
    if settings_given:
        raise ConfigError(f"--{settings_given[0].replace('_', '-')} is a setting of --train, which is not given.")
    if "length_penalty" in given and given.get("beams", 1) == 1:
        raise ConfigError("--length-penalty compares beams: it needs --beams of at least 2.")
    for one in options.sentences:
        check_sentence(one)
    model = translator.load(given.pop("model", MODEL))
    if options.evaluate:
        source, reference = options.evaluate
        print_scores(model, source, reference, given)
        return 0
    open_console()  # characters that the terminal lacks are shown as ?
    sentences = read_lines() if options.lines else iter(options.sentences)
    while some := list(islice(sentences, BLOCK)):
        for one in translate_sentences(model, some, **given):
            sys.stdout.write(escape_controls(one) + "\n")
        sys.stdout.flush()
    return 0


def check_sentence(text: str) -> None:
    """Raise DataError for a sentence without a word, and for one that is a file or the name of one."""
    if not text.split():
        raise DataError("the text has no word to translate.")
    try:
        is_file = Path(text).is_file()
    except OSError:  # e.g. a name that is too long
        return
    if is_file:
        raise DataError(f"{text} is a file: --lines < {text} translates its lines.")
    if FILE_NAME_PATTERN.fullmatch(text):
        raise DataError(f"{text} is not a file. To translate it as words, pass it on standard input with --lines.")


def read_lines() -> Iterator[str]:
    """Yield the lines of standard input as they come, without a byte order mark."""
    for number, line in enumerate(sys.stdin):
        yield line if number else line.removeprefix(BYTE_ORDER_MARK)


def make_config(options: argparse.Namespace) -> TrainConfig:
    """Return the config of the defaults here, overridden by the file, overridden by the flags."""
    given = vars(options)
    flags = {name: given[name] for name in FIELDS if name in given}
    sizes = {name: given[name] for name in SIZES if name in given}
    file = {} if options.config is None else read_table(options.config)
    model = file.get("model", {})
    if isinstance(model, Mapping):  # anything else is refused by TrainConfig
        model = {**DEFAULTS["model"], **model}
    return TrainConfig.from_table({**DEFAULTS, **file, "model": model}, **flags, model=sizes)


def print_scores(model: translator.Translator, source: str, reference: str, settings: dict[str, Any]) -> None:
    """Print the scores of the translations of a file of sentences, one per line, against a file of reference translations."""
    sides = [read_text(Path(path)).removesuffix("\n").split("\n") for path in (source, reference)]
    if len(sides[0]) != len(sides[1]):
        counts = " and ".join(f"{path} {len(side):,}" for path, side in zip((source, reference), sides, strict=True))
        raise DataError(f"the files have unequal numbers of lines, {counts}: line n must translate line n.")
    if not any(one.split() for one in sides[0]):
        raise DataError(f"{source} has no sentence: it must have one on each line.")
    with show_count_bar("translating", len(sides[0])) as watch:
        found = list(translate_sentences(model, sides[0], **settings, watch=watch))
    print(f"{len(found):,} sentences")
    for score in (bleu, chrf):
        print(score(found, sides[1]))
