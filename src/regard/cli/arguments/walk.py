"""regard walk: show each step of attention with its formula, numbers and an explanation, on an example or your own words."""

import argparse

from regard.cli.arguments import derived

ROWS, WHOLE = 12, 16  # words shown of a long sentence; a sentence of this many is shown whole
EPILOG = """\
The numbers are float32. Where JSON cannot hold one it is a string: "-inf",
"inf" or "nan". In --json `steps` has every step by name, `scenes` what the
screen shows; an index such as `query` counts from 0.
NO_COLOR=1 leaves out every colour; a pipe has none. COLUMNS=120 sets the
width where there is no terminal."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `regard walk`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    known = derived.read("walk")
    what = parser.add_argument_group("what to walk through")
    what.add_argument(
        "--example", metavar="NAME", help=f"one of the lectures': {', '.join(known['examples'])} (simple by default)"
    )
    what.add_argument(
        "--model",
        metavar="NAME",
        help="of --example additive: that of a trained translator, a folder or `translator`, which is carried here, on --words "
        f"({known['sentence']!r}) and what it makes of them",
    )
    what.add_argument("--list", action="store_true", help="the examples, a sentence each")
    what.add_argument("--query", metavar="WORD", help="one word's row as arithmetic; or its number, counted from 1")
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
        "--heads", metavar="N", type=int, help="heads that the weights are split into; random weights where no file"
    )
    own.add_argument(
        "--mask",
        metavar="RULE",
        help="causal, none, window:LEFT[,RIGHT] (keys before and after; RIGHT left out is no bound), prefix:N (the first N "
        "keys); joined by & and | as in Python: 'causal|prefix:2'",
    )
    own.add_argument("--seed", metavar="N", type=int, help="of random vectors and weights (123 by default)")
    shown = parser.add_argument_group("how it is shown")
    shown.add_argument(
        "--from", dest="start", metavar="WORD", help="the word that a long sentence is shown from; or its number"
    )
    shown.add_argument("--rows", metavar="N", type=int, help=f"how many words are shown (all up to {WHOLE}, else {ROWS})")
    shown.add_argument("--json", action="store_true", help="every step, whole, for a program; nothing else is printed")
