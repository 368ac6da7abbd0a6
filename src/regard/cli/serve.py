"""Run `regard serve`.

Exit code 2 if the recording or the model cannot be used, or the address is taken.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from regard.cli.arguments.look import MODEL
from regard.cli.input_text import read_text
from regard.cli.model_loading import CAUSAL_LM, SMOLLM2, SMOLLM2_COMMANDS, is_smollm2_installed, load_model
from regard.errors import ConfigError
from regard.models import translator
from regard.observe import load
from regard.show.page import import_server
from regard.show.page.translator_adapter import adapt_translator
from regard.weights.translator_weights import INCLUDED_TRANSLATORS, SETTINGS


def run(options: argparse.Namespace) -> int:
    """Serve until Ctrl-C."""
    name = options.model or (None if options.recording else choose_default_model())
    if options.text is not None and name is None:
        raise ConfigError("--text needs a model: give one with --model.")
    if not 0 <= options.port < 65536:
        raise ConfigError(f"--port must be at least 0 and below 65536, got {options.port}.")
    module = import_server()
    recording = load(options.recording) if options.recording else None
    model = load_page_model(name) if name else None
    text = None if options.text is None else read_text(options.text)
    server = module.make_server(recording, adapter=model, text=text, host=options.host, port=options.port)
    server.run(lambda: server.announce(options.open))
    return 0


def choose_default_model() -> str:
    """Return SmolLM2 where it is installed, else the pocket model, after a line that says what to install."""
    if is_smollm2_installed():
        return SMOLLM2
    print(f"The page runs the small pocket model. For SmolLM2: {SMOLLM2_COMMANDS}.", file=sys.stderr)
    return MODEL


def load_page_model(name: str) -> Any:
    """Load a model: a translator if the name or the folder is one's, else as in `regard look`."""
    path = Path(name).expanduser()
    folder = path.resolve().parent if path.name == "model" else path  # the folder of a run of regard translate --train
    if (path / SETTINGS).is_file() or (name in INCLUDED_TRANSLATORS and not path.exists()):
        return adapt_translator(folder.name, translator.load(name))
    return load_model(name, CAUSAL_LM)
