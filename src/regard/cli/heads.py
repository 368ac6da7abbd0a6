"""Run `regard heads`.

Exit code 2 if the file is not a recording.
"""

import argparse

from regard.cli.look import report
from regard.observe import load
from regard.show.axes import attention_of
from regard.show.page.onefile import page


def run(options: argparse.Namespace) -> int:
    """Classify the heads and print."""
    recording = load(options.recording)
    kind = attention_of(recording, options.attention)
    q, k = recording.map(0, kind=kind).shape[2:]
    line = f"{q:,} tokens look at {k:,}." if kind == "cross" else f"{q:,} tokens."
    if options.page:
        page(recording, options.page)
        line += f" Page: {options.page}."
    report(recording, options, line)
    return 0
