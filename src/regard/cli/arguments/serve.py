"""The arguments of `regard serve`."""

import argparse

from regard.cli.arguments.look import MODEL, add_device_argument

EPILOG = """\
RECORDING is what `regard look --out` or recording.save wrote. With a model the
page runs the text that is typed into it; a translator (a folder, or a name as
in `regard translate --model`) translates it. Both may be given; without either,
it is smollm2 if that is installed, else the pocket model. For other machines
(--host 0.0.0.0) the link contains a token; requests without it are refused."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `regard serve`."""
    parser.add_argument("recording", metavar="RECORDING", nargs="?", help="a file of a recording")
    parser.add_argument(
        "--model",
        metavar="NAME",
        action="append",
        help="the model for the typed text, as in regard look, or a translator; without RECORDING, smollm2 if it is installed, "
        f"else {MODEL}; given several times, the page has a choice among them",
    )
    add_device_argument(parser)
    parser.add_argument("--text", metavar="TEXT", help="the first text: a file, the words themselves, or -")
    parser.add_argument("--host", metavar="ADDRESS", default="127.0.0.1", help="where to listen (127.0.0.1)")
    parser.add_argument("--port", metavar="N", type=int, default=0, help="the port (any that is free)")
    parser.add_argument("--open", action="store_true", help="open the browser too")
