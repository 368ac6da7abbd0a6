"""The arguments of `regard look`."""

import argparse

from regard.cli.arguments import derived

MODEL, SMOLLM2 = "pocket", "smollm2"  # the default, and a larger one that a package holds
EPILOG = """\
TEXT is a file, or the words themselves, or - for standard input. The model
runs unchanged; queries and keys are recorded, and every number is computed
from them: no attention matrix is stored. --out saves the recording for
`regard heads` and for regard.load in Python.

"""
KINDS = "prefix matching, duplicate, previous token, first token, stripe, itself, local, broad or unclear"
COLUMNS = """\
The columns are means over the tokens of the text. Of a token's attention:
  prev, self    on the token before, on itself
  dup, ind      on earlier places of the same token, on what came after these
  first, sink   on the first token; how many tokens have more than 0.3 there
  local         on the 16 tokens before it and itself
  dist, keys    how many tokens back it looks, at how many tokens
  heavy         the share of all attention that a twentieth of the tokens gets"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `regard look`."""
    parser.add_argument("text", metavar="TEXT", help="a text file, the words themselves, or -")
    parser.add_argument(
        "--model",
        metavar="NAME",
        default=MODEL,
        help="smollm2; a Hugging Face model: folder, .gguf file or hub name; GPT-2 weights of any source; sorter; or pocket",
    )
    parser.add_argument("--tokens", metavar="N", type=int, help="the first N tokens of the text (the model's context)")
    add_device_argument(parser)
    parser.add_argument("--keep", metavar="DTYPE", help="keep queries and keys as bfloat16: half of the memory")
    parser.add_argument("--out", metavar="FILE", help="save the recording")
    parser.add_argument(
        "--why",
        metavar="WORD",
        nargs="?",
        const="",
        help="which tokens moved the logit of WORD as the next token, or of the likeliest",
    )
    add_table_arguments(parser)


def add_device_argument(parser: argparse.ArgumentParser) -> None:
    """Add --device."""
    parser.add_argument("--device", metavar="NAME", help="where the model runs, e.g. cuda or mps (cpu)")


def add_table_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the table that `regard look` and `regard heads` share."""
    parser.epilog = (parser.epilog or "") + COLUMNS
    parser.add_argument(
        "--json", action="store_true", help="print the heads as JSON: layer, head, kind, sentence, scores with intervals"
    )
    parser.add_argument(
        "--csv", action="store_true", help="print the heads as CSV: a line for each, with the low, high and count of each score"
    )
    parser.add_argument("--all", action="store_true", help="a row for every head, not only for the clearest of each kind")
    parser.add_argument("--kind", metavar="KIND", help=f"only heads of this kind: {KINDS}")
    parser.add_argument(
        "--attention",
        choices=derived.read_flags("look")["kinds"],
        help="of a text to itself, or to another text, e.g. of a translation to its source (self if there is any); implicit: "
        "layers without a softmax",
    )
    parser.add_argument("--sort", metavar="SCORE", help="sort the rows by a score, e.g. prev or entropy, largest first")
    parser.add_argument("--head", metavar="L.H", help="a heat map of head H of layer L, or of layer L: the mean of its heads")
    parser.add_argument("--page", metavar="FILE", help="write a page for the browser: one .html file, no network")
    parser.add_argument(
        "--query", metavar="WORD", help="what a word, or the token with a number, looked at: in --head, or in all heads"
    )
