"""The arguments of `regard heads`."""

import argparse

from regard.cli.arguments.look import add_table_arguments

EPILOG = """\
FILE is a recording: the heads are described on its text. With --model, the
model reads random tokens that are repeated, which tells apart heads that text
does not: induction heads are named only where they copy, too.

  copying       logits by which a head raises the tokens it attends to
  ov            eigenvalues of its OV circuit, from -1 to 1: all positive
  effect        by how many nats the loss rises without the head
  succession    how often it raises the next of a sequence: Monday, Tuesday
  retrieval     how much of a hidden sentence it finds as the model writes it

"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `regard heads`."""
    parser.add_argument("recording", metavar="FILE", nargs="?", help="what `regard look --out` or recording.save wrote")
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="instead of FILE: probe a language model: pocket, smollm2, a folder, a .gguf file or a name on the hub",
    )
    parser.add_argument("--seeds", metavar="N", type=int, help="rows of the probe (8)")
    parser.add_argument(
        "--ablate",
        choices=("patterns", "all", "none"),
        help="measure what the loss does without the heads that a pattern names, without each head, or not at all (patterns)",
    )
    parser.add_argument(
        "--by",
        choices=("zero", "mean", "resample"),
        help="what stands for an ablated head: 0, or the mean or one of other rows (mean)",
    )
    parser.add_argument("--text", metavar="FILE", help="also measure what the loss on this text does without a head")
    parser.add_argument(
        "--haystack", metavar="FILE", help="also measure retrieval: sentences are hidden in this text, and asked for"
    )
    add_table_arguments(parser)
