"""The arguments of `regard walk`."""

import argparse

from regard.cli.arguments import derived

ROWS, WHOLE = 12, 16  # words shown of a long sentence; a sentence of this many is shown whole
EPILOG = """\
The numbers are float32. One that JSON cannot hold is a string: "-inf",
"inf" or "nan". In --json `steps` has every step by name, `scenes` what the
screen shows; indices like `query` count from 0.
NO_COLOR=1 turns colors off; a pipe has none. COLUMNS=120 sets the width if
there is no terminal."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `regard walk`."""
    known = derived.read_flags("walk")
    what = parser.add_argument_group("what to walk through")
    what.add_argument(
        "--example", metavar="NAME", help=f"an example of the lectures: {', '.join(known['examples'])} (simple by default)"
    )
    what.add_argument(
        "--model",
        metavar="NAME",
        help="for --example additive: a trained translator, a folder or `translator`, which is included, on --words "
        f"({known['sentence']!r}) and its translation",
    )
    what.add_argument("--list", action="store_true", help="list the examples, with a sentence each")
    what.add_argument("--query", metavar="WORD", help="show the row of a word, or of its number from 0, as arithmetic")
    own = parser.add_argument_group("your own words")
    own.add_argument("--words", metavar="SENTENCE", help="words with spaces between; equal words share a vector")
    own.add_argument(
        "--vectors",
        metavar="FILE",
        help=".npy, .npz, .csv or .safetensors: a row for each word, or a named vector for some words; "
        "words without one get random vectors",
    )
    own.add_argument(
        "--weights",
        metavar="FILE",
        help="W_query, W_key, W_value [, out_proj]: a state dict of the lectures' layers, or plain matrices (d_in, d_out)",
    )
    own.add_argument(
        "--heads", metavar="N", type=int, help="heads that the weights are split into; random weights without a file"
    )
    own.add_argument(
        "--mask",
        metavar="RULE",
        help="causal, none, window:LEFT[,RIGHT] (keys before and after; without RIGHT no bound), prefix:N (the first N "
        "keys); joined by & and | as in Python: 'causal|prefix:2'",
    )
    own.add_argument("--seed", metavar="N", type=int, help="of random vectors and weights (123 by default)")
    shown = parser.add_argument_group("how it is shown")
    shown.add_argument("--from", dest="start", metavar="WORD", help="the word, or its number, at which a long sentence begins")
    shown.add_argument("--rows", metavar="N", type=int, help=f"how many words are shown (all up to {WHOLE}, else {ROWS})")
    shown.add_argument("--json", action="store_true", help="print every step in full as JSON, and nothing else")
