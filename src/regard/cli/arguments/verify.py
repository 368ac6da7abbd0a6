"""The arguments of `regard verify`."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `regard verify`."""
    parser.add_argument("examples", nargs="*", metavar="EXAMPLE", help="only these examples, by name; all by default")
    parser.add_argument("--json", action="store_true", help="print every comparison with its numbers as JSON")
