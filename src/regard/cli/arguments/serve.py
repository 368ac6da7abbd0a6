"""regard serve: show a recording, or a model and the text you type, on a page in the browser."""

import argparse

from regard.cli.arguments.look import MODEL

EPILOG = """\
RECORDING is what `regard look --out` or recording.save wrote. With a model the
page runs whatever is typed into it, and a translator (a folder, or a name as in
`regard translate --model`) translates it; both may be given, and with neither
it is the pocket model. Beyond this machine (--host 0.0.0.0) the link holds a
token, and without it nothing is answered."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `regard serve`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument("recording", metavar="RECORDING", nargs="?", help="a file of a recording")
    parser.add_argument(
        "--model",
        metavar="NAME",
        help=f"what runs the text that is typed, as in regard look, or a translator ({MODEL} without RECORDING)",
    )
    parser.add_argument("--text", metavar="TEXT", help="what it reads first: a text file, the words themselves, or -")
    parser.add_argument("--host", metavar="ADDRESS", default="127.0.0.1", help="where to listen (127.0.0.1)")
    parser.add_argument("--port", metavar="N", type=int, default=0, help="at which port (any that is free)")
    parser.add_argument("--open", action="store_true", help="open the browser too")
