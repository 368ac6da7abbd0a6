"""regard heads: what kind each head of a saved recording is.

Exit code 2 where the file is no recording.
"""

import argparse

from regard.cli.look import add_table_arguments, report
from regard.observe import load


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What may stand after `regard heads`."""
    parser.add_argument("recording", metavar="FILE", help="what `regard look --out` or recording.save wrote")
    add_table_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Types the heads and prints."""
    recording = load(options.recording)
    queries = recording.map(0).shape[2]
    report(recording, options, f"{queries:,} tokens.")
    return 0
