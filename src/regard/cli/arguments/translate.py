"""regard translate: translate sentences, score translations against human ones, or train a translator from scratch."""

import argparse

from regard.cli.arguments import derived

MODEL = "translator"  # the default

EPILOG = """\
With --train, every setting under it is that of `regard train`: a run lies in
one folder, --out, the same command goes on with it, and its folder model is
what --model reads. What stands under --config goes under [model] there where
it is a size, with kind = "transformer" or "recurrent"."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `regard translate`."""
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
    for flag in derived.read("translate"):
        derived.add_flag(learning, **flag)
