"""The arguments of `regard translate`."""

import argparse

from regard.cli.arguments import derived

MODEL = "translator"  # the default

EPILOG = """\
The settings of --train are those of `regard train`: a run is one folder, --out,
the same command resumes it, and --model reads its folder model. In a --config
file the sizes are under [model], with kind = "transformer" or "recurrent"."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `regard translate`."""
    parser.add_argument("sentences", metavar="SENTENCE", nargs="*", help="what to translate, each in quotes")
    parser.add_argument(
        "--lines", action="store_true", help="read a sentence per line from standard input, print a translation per line"
    )
    parser.add_argument("--model", metavar="NAME", help=f"a folder that --train wrote, or {MODEL} ({MODEL})")
    parser.add_argument("--beams", metavar="N", type=int, help="search with N beams; 1: always the likeliest word (1)")
    parser.add_argument("--length-penalty", metavar="X", type=float, help="with beams: above 1 longer, below 1 shorter (1)")
    parser.add_argument("--evaluate", metavar="FILE", nargs=2, help="BLEU and chrF: sentences, and human translations of them")
    learning = parser.add_argument_group("--train")
    learning.add_argument("--train", action="store_true", help="train on sentence pairs")
    learning.add_argument("--config", metavar="FILE", help="a TOML file of these settings; flags override it")
    for flag in derived.read_flags("translate"):
        derived.add_flag(learning, **flag)
