"""regard look: show what the attention of a model does on a text: the kind of each head, and the strongest links."""

import argparse

from regard.cli.arguments import derived

MODEL = "pocket"  # the default
EPILOG = """\
TEXT is a file, or the words themselves, or - for standard input. The model
runs as it always does; queries and keys are kept, and every number comes
from them: no matrix is stored. --out keeps the recording for `regard heads`
and for regard.load in Python.

"""
COLUMNS = """\
The columns are means over the words of the text. Of a word's attention:
  prev, self    on the word before, on itself
  dup, ind      on earlier places of the same word, on what came after these
  first, sink   on the first word; how many words have more than 0.3 there
  local         on the 16 words before it and itself
  dist, keys    how many words back it looks, at how many words
  heavy         what a twentieth of the words receives of all attention"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `regard look`."""
    parser.epilog = EPILOG
    parser.add_argument("text", metavar="TEXT", help="a text file, the words themselves, or -")
    parser.add_argument(
        "--model",
        metavar="NAME",
        default=MODEL,
        help="a Hugging Face model: folder, .gguf file or hub name; a GPT-2 from anyone's weights; sorter; or pocket (pocket)",
    )
    parser.add_argument("--tokens", metavar="N", type=int, help="the first N tokens of the text (the model's context)")
    parser.add_argument("--keep", metavar="DTYPE", help="keep queries and keys as bfloat16: half of the memory")
    parser.add_argument("--out", metavar="FILE", help="save the recording")
    add_table_arguments(parser)


def add_table_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the table that `regard look` and `regard heads` share."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = (parser.epilog or "") + COLUMNS
    parser.add_argument("--all", action="store_true", help="a row for every head, not only for the clearest of each kind")
    parser.add_argument("--kind", metavar="KIND", help="only heads of this kind, 'induction' say")
    parser.add_argument(
        "--attention",
        choices=derived.read("look")["kinds"],
        help="of a text to itself, or of one to another, as of a translation to its source (self where there is some)",
    )
    parser.add_argument("--sort", metavar="SCORE", help="rows by a score, 'previous token' say, largest first")
    parser.add_argument("--head", metavar="L.H", help="a heat map of head H of layer L, or of layer L: the mean of its heads")
    parser.add_argument("--page", metavar="FILE", help="write a page for the browser: one .html file, no network")
    parser.add_argument(
        "--query", metavar="WORD", help="what a word, or the token of a number, looked at: of --head, or of all"
    )
