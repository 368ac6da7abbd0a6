"""regard serve: a recording, or a model and what you type, as a page in the browser.

Exit code 2 where the recording or the model cannot be used, or the address is taken.
"""

import argparse
from pathlib import Path
from typing import Any

from regard.cli.foreign import WRITER, opened
from regard.cli.look import MODEL, read
from regard.errors import ConfigError
from regard.models import translator
from regard.observe import load
from regard.show.page import live
from regard.show.page.translating import translating
from regard.weights.translators import CARRIED, SETTINGS

EPILOG = """\
RECORDING is what `regard look --out` or recording.save wrote. With a model the
page runs whatever is typed into it, and a translator (a folder, or a name as in
`regard translate --model`) translates it; both may be given, and with neither
it is the pocket model. Beyond this machine (--host 0.0.0.0) the link holds a
token, and without it nothing is answered."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What may stand after `regard serve`."""
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


def run(options: argparse.Namespace) -> int:
    """Serves until Ctrl-C."""
    name = options.model or (None if options.recording else MODEL)
    if options.text is not None and name is None:
        raise ConfigError("--text is what a model reads: say which with --model.")
    if not 0 <= options.port < 65536:
        raise ConfigError(f"--port must be at least 0 and below 65536, got {options.port}.")
    module = live()
    recording = load(options.recording) if options.recording else None
    model = speaker(name) if name else None
    text = None if options.text is None else read(options.text)
    server = module.server(recording, speaker=model, text=text, host=options.host, port=options.port)
    server.run(lambda: server.announce(options.open))
    return 0


def speaker(name: str) -> Any:
    """The model of a name: a translator where the name or the folder is one's, else as in regard look."""
    path = Path(name).expanduser()
    folder = path.resolve().parent if path.name == "model" else path  # of a run of regard translate --train
    if (path / SETTINGS).is_file() or (name in CARRIED and not path.exists()):
        return translating(folder.name, translator.load(name))
    return opened(name, WRITER)
