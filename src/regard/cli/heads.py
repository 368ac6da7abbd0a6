"""Run `regard heads`.

Exit code 2 if the file is not a recording.
"""

import argparse

from regard.cli.look import print_report
from regard.observe import load
from regard.show.axis_words import choose_attention_kind
from regard.show.page.single_file import page


def run(options: argparse.Namespace) -> int:
    """Classify the heads and print."""
    recording = load(options.recording)
    kind = choose_attention_kind(recording, options.attention)
    q, k = recording.map(0, kind=kind).shape[2:]
    line = f"{q:,} tokens look at {k:,}." if kind == "cross" else f"{q:,} tokens."
    if options.page:
        page(recording, options.page)
        line += f" Page: {options.page}."
    print_report(recording, options, line)
    return 0
