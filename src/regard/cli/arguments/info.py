"""The arguments of `regard info`."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `regard info`."""
    parser.add_argument("--json", action="store_true", help="print everything as JSON, for a program")
    parser.add_argument(
        "--no-measure", action="store_true", help="do not measure memory bandwidth and matrix products (one second)"
    )
    parser.add_argument("--clear-cache", action="store_true", help="remove the weights of .gguf files that were converted")
