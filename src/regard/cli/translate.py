"""regard translate: a sentence in another language; how near translations are to people's; a translator from its first weight.

Exit code 2 where the model, the files or the settings cannot be used; with --train those of `regard train`.
"""

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import Any, get_type_hints

from regard.cli import train
from regard.cli.progress import watched
from regard.errors import ConfigError, DataError
from regard.evaluate.translation import BLOCK, bleu, chrf, translations
from regard.models import translator
from regard.models.translator import KINDS
from regard.show.terminal import escaped, harmless, open_console
from regard.text.pairs.sources import read
from regard.train import TrainConfig
from regard.train.config import OF_TEXT, read_table
from regard.train.sizes import arguments

EPILOG = """\
With --train, every setting under it is that of `regard train`: a run lies in
one folder, --out, the same command goes on with it, and its folder model is
what --model reads. What stands under --config goes under [model] there where
it is a size, with kind = "transformer" or "recurrent"."""

MODEL = "translator"  # where none is named
START: dict[str, Any] = {"vocabulary": "4000", "label_smoothing": 0.1, "model": {"kind": "transformer", "dropout": 0.1}}
FIELDS = [one.name for one in fields(TrainConfig) if one.name not in ("model", *OF_TEXT)]
SIZES = {
    "kind": "of model: transformer, or recurrent",
    "attention": "of a recurrent one: additive; nothing said, none",
    "width": "of a word's vector",
    "hidden": "width of a recurrent state",
    "layers": "of encoder and decoder each",
    "heads": "of a transformer's layer",
    "inner": "width of a transformer's feed-forward layers; nothing said, four times the width",
    "cell": "of a recurrent one: gru, or lstm",
    "norm": "of a transformer: post, as in 2017, or pre",
    "dropout": "the share of numbers that are left out in training",
    "tied": "source, target and logits share one embedding",
    "context": "tokens that a transformer reads at most",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What may stand after `regard translate`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument("sentences", metavar="SENTENCE", nargs="*", help="what to translate, each in quotes")
    parser.add_argument("--lines", action="store_true", help="a sentence a line from standard input, a translation a line")
    parser.add_argument("--model", metavar="NAME", default=MODEL, help=f"a folder that --train wrote, or {MODEL} ({MODEL})")
    parser.add_argument(
        "--beams", metavar="N", type=int, default=1, help="search with so many beams; 1: the likeliest word (1)"
    )
    parser.add_argument(
        "--length-penalty", metavar="X", type=float, default=1.0, help="above 1 longer, below 1 shorter, of beams (1)"
    )
    parser.add_argument(
        "--evaluate", metavar="FILE", nargs=2, help="BLEU and chrF: sentences, and people's translations of them"
    )
    learning = parser.add_argument_group("--train")
    learning.add_argument("--train", action="store_true", help="learn from sentence pairs")
    learning.add_argument("--config", metavar="FILE", help="a TOML file of these settings; flags go before it")
    hints = get_type_hints(TrainConfig)
    for one in fields(TrainConfig):
        if one.name in FIELDS:
            default = START.get(one.name, one.default)
            train.add_flag(learning, one.name, hints[one.name], default, one.metadata["says"])
    kinds = {"kind": (str, None)} | {name: kind for each in KINDS for name, kind in arguments(each).items()}
    for name, says in SIZES.items():
        kind, default = kinds[name]
        train.add_flag(learning, name, kind, START["model"].get(name, default), says)


def run(options: argparse.Namespace) -> int:
    """Trains, evaluates or translates."""
    said = [name for name in (*FIELDS, *SIZES) if name in vars(options)] + ["config"] * (options.config is not None)
    asked = {"sentences": bool(options.sentences), "--lines": options.lines, "--evaluate": bool(options.evaluate)}
    asked["--train"] = options.train
    if sum(asked.values()) != 1:
        both = " and ".join(name for name, given in asked.items() if given)
        raise ConfigError(f"say one of {', '.join(asked)}; got {both or 'none'}.")
    if options.train:
        return train.trained(configured(options))
    if said:
        raise ConfigError(f"--{said[0].replace('_', '-')} is a setting of --train, which is not said.")
    model = translator.load(options.model)
    settings = {"beams": options.beams, "length_penalty": options.length_penalty}
    if options.evaluate:
        source, reference = options.evaluate
        evaluate(model, source, reference, settings)
        return 0
    open_console()  # a terminal without a character shows a ?
    for some in blocks(sys.stdin if options.lines else options.sentences):
        for one in translations(model, some, **settings):
            sys.stdout.write("".join(letter if harmless(letter) else escaped(letter) for letter in one) + "\n")
        sys.stdout.flush()
    return 0


def configured(options: argparse.Namespace) -> TrainConfig:
    """The config of what is said here, the file over it, and the flags over both."""
    given = vars(options)
    flags = {name: given[name] for name in FIELDS if name in given}
    sizes = {name: given[name] for name in SIZES if name in given}
    file = {} if options.config is None else read_table(options.config)
    model = file.get("model", {})
    if isinstance(model, Mapping):  # what it must be, else TrainConfig says so
        model = {**START["model"], **model}
    return TrainConfig.of({**START, **file, "model": model}, **flags, model=sizes)


def evaluate(model: translator.Translator, source: str, reference: str, settings: dict[str, Any]) -> None:
    """Prints the scores of a file of sentences, a line each, against a file of their translations."""
    sides = [read(Path(path)).removesuffix("\n").split("\n") for path in (source, reference)]
    if len(sides[0]) != len(sides[1]):
        counts = " and ".join(f"{path} {len(side):,}" for path, side in zip((source, reference), sides, strict=True))
        raise DataError(f"the files have unequal numbers of lines, {counts}: line n must translate line n.")
    done = [0]
    with watched("translating", lambda: done[0], len(sides[0])):
        found = list(translations(model, sides[0], **settings, watch=lambda count: done.__setitem__(0, count)))
    print(f"{len(found):,} sentences")
    for score in (bleu, chrf):
        print(score(found, sides[1]))


def blocks(sentences: Iterable[str]) -> Iterator[list[str]]:
    """Sentences as they come, some at a time."""
    left = iter(sentences)
    while some := list(islice(left, BLOCK)):
        yield some
