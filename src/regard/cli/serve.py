"""Run `regard serve`.

Exit code 2 if the recording or the model cannot be used, or the address is taken.
"""

import argparse
from pathlib import Path
from typing import Any

from regard.cli.arguments.look import MODEL
from regard.cli.foreign import WRITER, opened
from regard.cli.look import read
from regard.errors import ConfigError
from regard.models import translator
from regard.observe import load
from regard.show.page import live
from regard.show.page.translating import translating
from regard.weights.translators import CARRIED, SETTINGS


def run(options: argparse.Namespace) -> int:
    """Serve until Ctrl-C."""
    name = options.model or (None if options.recording else MODEL)
    if options.text is not None and name is None:
        raise ConfigError("--text needs a model: give one with --model.")
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
    """Load a model: a translator if the name or the folder is one's, else as in `regard look`."""
    path = Path(name).expanduser()
    folder = path.resolve().parent if path.name == "model" else path  # the folder of a run of regard translate --train
    if (path / SETTINGS).is_file() or (name in CARRIED and not path.exists()):
        return translating(folder.name, translator.load(name))
    return opened(name, WRITER)
