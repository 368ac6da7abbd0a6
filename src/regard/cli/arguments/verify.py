"""regard verify: recompute every number that the lectures print."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `regard verify`."""
    parser.add_argument("examples", nargs="*", metavar="EXAMPLE", help="only these examples, by name; all where none is named")
    parser.add_argument("--json", action="store_true", help="every comparison with its numbers, for a program")
