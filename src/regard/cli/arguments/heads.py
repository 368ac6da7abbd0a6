"""regard heads: show the kind of each head of a saved recording."""

import argparse

from regard.cli.arguments.look import add_table_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `regard heads`."""
    parser.add_argument("recording", metavar="FILE", help="what `regard look --out` or recording.save wrote")
    add_table_arguments(parser)
