"""The arguments of `regard examine`."""

import argparse
import math
import threading

FORMATS = ("text", "sarif", "github")
WARNING = "It runs the code of the file or package, as Python and pytest would: examine only what you would run."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `regard examine`."""
    parser.epilog = WARNING
    parser.add_argument(
        "target",
        metavar="FILE.py:NAME",
        nargs="?",
        help="a class, an object or a function in a file, or package.module:NAME of an installed package",
    )
    parser.add_argument(
        "--model", metavar="FOLDER", help="examine the model in a folder, as other commands load it, instead of FILE.py:NAME"
    )
    parser.add_argument(
        "--args",
        nargs="*",
        metavar="VALUE",
        help="the arguments of the class, or of a function that makes the layer, as in Python: 768 768 "
        "num_heads=12 bias=False; what is not a Python literal is a string",
    )
    parser.add_argument(
        "--expects",
        metavar="RULE",
        default="causal",
        help="the expected mask: causal (the default), none (all see all), window:LEFT[,RIGHT], prefix:N, joined by & and |",
    )
    parser.add_argument(
        "--sample",
        metavar="SHAPE",
        help="the shape of an input, if it cannot be found: 2,6,768 for x, 2,3,6,64 for each of q, k and v",
    )
    parser.add_argument("--scale", metavar="S", type=float, help="what scores are multiplied by, if it is not 1 / √d")
    parser.add_argument("--offset", metavar="N", type=int, default=0, help="the position of the first query among the keys")
    parser.add_argument(
        "--time-limit",
        metavar="SECONDS",
        type=parse_seconds,
        help="end the subject after SECONDS, and report what was examined until then, with exit code 1; no limit by default",
    )
    parser.add_argument(
        "--no-strict",
        dest="strict",
        action="store_false",
        help="end with exit code 0, not 3, if nothing was found, though who sees whom, the rows of weights or the scale could "
        "not be examined",
    )
    parser.add_argument("--json", action="store_true", help="print the whole report as JSON")
    parser.add_argument(
        "--format",
        choices=FORMATS,
        default="text",
        help="print the findings as SARIF, or as annotations of GitHub Actions; text by default",
    )
    parser.add_argument(
        "--baseline",
        metavar="FILE",
        help="allow the findings that FILE lists, each with its reason: only others are reported as findings",
    )
    parser.add_argument("--write-baseline", metavar="FILE", help="write the findings to FILE, for --baseline")
    parser.add_argument("--page", metavar="FILE", help="write the report with its picture as a page too: one .html file")


def parse_seconds(text: str) -> float:
    """Parse --time-limit."""
    seconds = float(text)
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"a time limit is a positive number of seconds, got {text}")
    return min(seconds, threading.TIMEOUT_MAX)
