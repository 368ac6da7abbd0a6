"""The arguments of `regard audit`."""

import argparse

EPILOG = """\
TEXT is a file, or the words themselves, or - for standard input. A policy is
its name and its arguments: snapkv:budget=0.1,window=32. A budget is a number
of keys, or a share of the prompt. The policies are streamingllm, h2o, tova,
snapkv, observedattention, knorm, expectedattention, quest, blocksparse,
verticalslash, duoattention, quantised and oracle.

Over the queries after the prompt, of all layers and heads:
  keys      the mean number of keys that a query uses
  recall    the share of the attention on them: mean, 5 % quantile, least
  KL        KL(kept || complete) of the weights, -log recall, in nats
  error     |o_kept - o| / |o| of the output of a head
With --run, the model also runs with each policy:
  change    by how much the loss rises, in nats
  KL        KL(complete || policy) of the next-token distributions, in nats
  same      how often the likeliest next token stays the same
  stream    |x' - x| / |x| of the residual stream after the last block
With --needles, sentences are hidden in the text, N times for each kind of
task, and the table has how many of the questions after it are answered.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `regard audit`."""
    parser.add_argument("text", metavar="TEXT", help="a text file, the words themselves, or -")
    parser.add_argument(
        "--model", metavar="NAME", default="pocket", help="smollm2, a folder, a .gguf file, a name on the hub (pocket)"
    )
    parser.add_argument(
        "--policy", metavar="POLICY", action="append", required=True, help="a policy with its arguments; repeat it for several"
    )
    parser.add_argument("--tokens", metavar="N", type=int, help="the first N tokens of the text (the model's context)")
    parser.add_argument("--prompt", metavar="N", type=int, help="tokens that are read at once, before the rest (half of them)")
    parser.add_argument("--worst", metavar="N", type=int, default=3, help="the N worst rows of each policy, in words (3)")
    parser.add_argument("--run", action="store_true", help="run the model with each policy, too, and compare its predictions")
    parser.add_argument(
        "--needles", metavar="N", type=int, default=0, help="ask the model for N needles of each kind, as RULER does, too (0)"
    )
    parser.add_argument(
        "--certify",
        metavar="N",
        type=int,
        default=8,
        help="compute N rows of each head anew in float64, for the certificate (8)",
    )
    parser.add_argument("--figure", metavar="FILE", help="draw recall by layer and head, of each policy, as .png, .svg or .pdf")
    parser.add_argument("--page", metavar="FILE", help="write what was found as a page, .html, for a browser")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
